"""Own the table of the arguments of `vllm serve` 0.32: which a plan depends on, and which it does not.

A test with vLLM itself compares it with vLLM's own parser.
"""

from typing import Final

SWITCHES: Final = frozenset(
    (
        "async-scheduling",
        "disable-hybrid-kv-cache-manager",
        "enable-chunked-prefill",
        "enable-prefix-caching",
    )
)
"""Arguments that a plan depends on and that are true or false."""

VALUES: Final = frozenset(
    (
        "attention-backend",
        "block-size",
        "data-parallel-size",
        "decode-context-parallel-size",
        "dtype",
        "gpu-memory-utilization",
        "hf-config-path",
        "kv-cache-dtype",
        "kv-cache-memory-bytes",
        "kv-offloading-size",
        "kv-transfer-config",
        "mamba-cache-mode",
        "max-model-len",
        "max-num-batched-tokens",
        "max-num-seqs",
        "model",
        "num-gpu-blocks-override",
        "performance-mode",
        "pipeline-parallel-size",
        "prefix-match-unit",
        "tensor-parallel-size",
    )
)
"""Arguments that a plan depends on and that have a value."""

REFUSED: Final = frozenset(
    """
additional-config attention-config aux-output-config config config-format convert
cp-kv-cache-interleave-size dcp-kv-cache-interleave-size dcp-q-replicate diffusion-config
disable-chunked-mm-input disable-sliding-window elastic-ep-max-dp-size enable-elastic-ep enable-hc-sp
enable-mamba-shared-prefix-checkpoint engram-config gdn-prefill-backend grpc headless hf-overrides
kda-decode-backend kda-prefill-backend kv-cache-dtype-skip-layers kv-sharing-fast-prefill
language-model-only mamba-backend mamba-block-size mamba-cache-dtype mamba-ssm-cache-dtype
max-num-scheduled-tokens mm-encoder-only model-class-overrides model-impl pooler-config
prefill-context-parallel-size quantization-config replayssm-buffer-len runner scheduler-cls spec-method
spec-model spec-tokens speculative-config swa-bounded-replay use-replayssm worker-cls worker-extension-cls
""".split()  # noqa: SIM905  # a table reads best without a quote around every name
)
"""Arguments that may change layers, pages or tables in ways that this planner does not know."""

IGNORED_SWITCHES: Final = frozenset(
    """
aggregate-engine-logging allow-credentials allow-deprecated-quantization cohere-is-reasoning-model
cudagraph-metrics data-parallel-external-lb data-parallel-hybrid-lb data-parallel-multi-port-external-lb
disable-cascade-attn disable-custom-all-reduce disable-fastapi-docs disable-log-stats
disable-nccl-for-dp-synchronization disable-uvicorn-access-log enable-auto-tool-choice
enable-batch-sharded-sampling enable-cumem-allocator enable-dbo enable-ep-weight-filter enable-eplb
enable-expert-parallel enable-fault-tolerance enable-flash-late-interaction enable-flashinfer-autotune
enable-force-include-usage enable-layerwise-nvtx-tracing enable-log-deltas enable-log-outputs
enable-log-requests enable-logging-iteration-details enable-lora enable-mamba-cache-stochastic-rounding
enable-mfu-metrics enable-mixed-moe-lora-format enable-mm-embeds enable-moe-shared-loras
enable-nccl-comm-suspend enable-offline-docs enable-per-request-metrics enable-prompt-embeds
enable-prompt-tokens-details enable-request-id-headers enable-return-routed-experts enable-scale-out
enable-server-load-tracking enable-shm-tensor-arena enable-sleep-mode enable-ssl-refresh
enable-tokenizer-info-endpoint enable-tower-connector-lora enable-trace-replay enforce-eager
exclude-tools-when-tool-choice-none fail-on-environ-validation fully-sharded-loras interleave-mm-strings
jit-monitor-verbose kv-cache-metrics log-error-stack long-prefill-token-threshold-adaptive
mm-device-do-normalize numa-bind ray-workers-use-nsight return-sampling-mask return-tokens-as-token-ids
scheduler-reserve-full-isl skip-mm-profiling skip-tokenizer-init sleep-mode-offload-cudagraph
specialize-active-lora tokens-only trust-remote-code trust-request-chat-template trust-request-mm-kwargs
use-fp64-gumbel use-tqdm-on-load
""".split()  # noqa: SIM905
)
"""Arguments that do not matter to a plan and take no value."""

IGNORED_VALUES: Final = frozenset(
    """
all2all-backend allowed-headers allowed-local-media-path allowed-methods allowed-origins
anthropic-disabled-thinking-effort api-server-count chat-template chat-template-content-format code-revision
cohere-format compilation-config cpu-distributed-timeout-seconds cpu-offload-gb custom-histogram-buckets
data-parallel-address data-parallel-backend data-parallel-rank data-parallel-rpc-port
data-parallel-size-local data-parallel-start-rank data-parallel-supervisor-port dbo-decode-token-threshold
dbo-prefill-token-threshold dcp-comm-backend default-chat-template-kwargs default-mm-loras device-ids
disable-access-log-for-endpoints distributed-executor-backend distributed-timeout-seconds download-dir
dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s
dp-sync-interval ec-manager-config ec-transfer-config eplb-config expert-placement-strategy
fault-tolerance-config fingerprint-mode fingerprint-value generation-config grpc-port h11-max-header-count
h11-max-incomplete-event-size hf-token host io-processor-plugin ir-op-priority jit-monitor-mode
kernel-config kv-cache-metrics-sample kv-events-config kv-offloading-backend limit-mm-per-prompt
linear-backend load-format log-config-file log-level logging-config logprobs-mode
long-prefill-token-threshold lora-dtype mamba-cache-philox-rounds mamba-ssu-algorithm master-addr
master-port max-cpu-loras max-cudagraph-capture-size max-log-len max-logprobs max-lora-cls-labels
max-lora-rank max-loras max-num-active-seqs max-num-queued-reqs max-num-queued-tokens
max-parallel-loading-workers media-io-kwargs middleware mm-encoder-attn-backend mm-encoder-attn-dtype
mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path mm-encoder-tp-mode
mm-hasher-algorithm mm-ipc-gpu-memory-gb mm-processor-cache-gb mm-processor-cache-type mm-processor-device
mm-processor-kwargs mm-shm-cache-max-object-size-mb mm-tensor-ipc model-loader-extra-config moe-backend
nnodes node-rank offload-backend offload-group-size offload-num-in-group offload-prefetch-step
optimization-level otlp-traces-endpoint override-generation-config per-request-spec-decode-metrics port
prefill-schedule-interval prefix-cache-retention-interval prefix-caching-hash-algo profiler-config
pt-load-map-location quantization reasoning-config reasoning-parser reasoning-parser-plugin
renderer-num-workers response-role revision root-path safetensors-load-strategy
safetensors-prefetch-block-size safetensors-prefetch-num-threads scheduling-policy seed
show-hidden-metrics-for-version shutdown-timeout sparse-indexer-topk-backend sse-keep-alive-interval
ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile stream-interval structured-outputs-config
tokenizer tokenizer-mode tokenizer-revision tool-call-parser tool-parser-plugin tool-server
tool-strict-level ubatch-size uds uvicorn-log-level video-pruning-method video-pruning-rate watermark
watermark-config weight-transfer-config
""".split()  # noqa: SIM905
)
"""Arguments that do not matter to a plan and take a value."""

IGNORED_LISTS: Final = frozenset(
    """
allowed-media-domains api-key collect-detailed-traces cpu-offload-params cudagraph-capture-sizes
ignore-patterns logits-processors lora-modules lora-target-modules numa-bind-cpus numa-bind-nodes
offload-params served-model-name sleep-preserve-parameter-names
""".split()  # noqa: SIM905
)
"""Arguments that do not matter to a plan and take several values."""

AT_LEAST_ONE: Final = frozenset(
    {
        "block-size",
        "data-parallel-size",
        "decode-context-parallel-size",
        "max-num-batched-tokens",
        "max-num-seqs",
        "pipeline-parallel-size",
        "prefill-context-parallel-size",
        "tensor-parallel-size",
    }
)
"""Numbers that vLLM refuses if they are 0."""
ALIASES: Final = {
    "--device-memory-utilization": "gpu-memory-utilization",
    "-ac": "attention-config",
    "-asc": "api-server-count",
    "-cc": "compilation-config",
    "-dc": "diffusion-config",
    "-dcp": "decode-context-parallel-size",
    "-dp": "data-parallel-size",
    "-dpa": "data-parallel-address",
    "-dpb": "data-parallel-backend",
    "-dpe": "data-parallel-external-lb",
    "-dph": "data-parallel-hybrid-lb",
    "-dpl": "data-parallel-size-local",
    "-dpm": "data-parallel-multi-port-external-lb",
    "-dpn": "data-parallel-rank",
    "-dpp": "data-parallel-rpc-port",
    "-dpr": "data-parallel-start-rank",
    "-ep": "enable-expert-parallel",
    "-n": "nnodes",
    "-pcp": "prefill-context-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-q": "quantization",
    "-r": "node-rank",
    "-sc": "speculative-config",
    "-tp": "tensor-parallel-size",
}
"""Other names of arguments."""
