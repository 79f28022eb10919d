"""Own what was decided on every setting of vLLM 0.32: whether it changes a byte of K or V, and how the identity tells.

A setting that vLLM adds is in none of these tables, and fails the test until somebody has decided on it. When in doubt,
a setting goes into the identity: two engines that differ in it share nothing, which costs hits and no answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What was decided on the settings of one class of vLLM's configuration; names are separated by blanks."""

    path: str
    """Where the configuration is, below vLLM's whole one."""
    told: Mapping[str, str] = field(default_factory=dict)
    """For fields of the identity, the settings that they tell."""
    follows: Mapping[str, str] = field(default_factory=dict)
    """For reasons, the settings that vLLM makes of others, or that the plan compares number by number."""
    moves_nothing: Mapping[str, str] = field(default_factory=dict)
    """For reasons, the settings that change no byte of K or V."""

    def names(self) -> list[str]:
        """Return every setting on which something was decided; twice, if it is in two tables."""
        tables = (self.told, self.follows, self.moves_nothing)
        return [name for table in tables for names in table.values() for name in names.split()]

    def told_names(self) -> dict[str, str]:
        """Return the field of the identity for each setting that is told."""
        return {name: where for where, names in self.told.items() for name in names.split()}

    def idle_names(self) -> list[str]:
        """Return the settings that change nothing."""
        return [name for names in self.moves_nothing.values() for name in names.split()]


_BELOW: Final = "decided on setting by setting, in a table of its own"
_ROUNDS: Final = (
    "changes the order of sums, and so at most how they are rounded, as the tokens of a step do"
)
_SAMPLES: Final = "looks at what the last layer computed, to choose or report tokens"
_SAYS: Final = "logs, measures or reports"
_SCHEDULES: Final = "decides when what is computed, and how much at once"
_PLACES: Final = "decides where memory is and how much, not what is in it"
_SPEAKS: Final = "decides how processes find and tell each other"
_TOKENS: Final = "changes which tokens a text has, and the hashes are made of tokens"

DECISIONS: Final[Mapping[str, Decisions]] = {
    "VllmConfig": Decisions(
        path="",
        told={"arithmetic": "additional_config"},
        follows={
            _BELOW: (
                "model_config cache_config parallel_config load_config attention_config mamba_config kernel_config "
                "lora_config speculative_config diffusion_config device_config compilation_config scheduler_config"
            ),
            "made of the model's quantization": "quant_config",
        },
        moves_nothing={
            "moves weights between devices": "offload_config",
            "decides where embeddings are stored": "engram_config",
            "reports which experts were chosen": "aux_output_config",
            _SAMPLES: "watermark_config structured_outputs_config reasoning_config",
            _SAYS: "observability_config logging_config profiler_config kv_events_config instance_id",
            "names the connector, which has its own settings": "kv_transfer_config",
            "moves or keeps what an encoder computed": "ec_transfer_config ec_manager_config",
            _ROUNDS: "optimization_level performance_mode",
            "decides how weights come; an update is followed by a reset": "weight_transfer_config",
            _SCHEDULES: "shutdown_timeout",
        },
    ),
    "ModelConfig": Decisions(
        path="model_config",
        told={
            "model": "model",
            "revision": "revision",
            "load_format": "model_weights seed",
            "code": "model_impl model_class_overrides trust_remote_code code_revision",
            "dtype": "dtype",
            "quantization": "quantization quantization_config",
            "overrides": "hf_overrides",
            "config": "hf_config_path max_model_len",
        },
        follows={
            "loaded from the model's files": (
                "hf_config hf_text_config is_submodel_config word_embeddings_untied_by_checkpoint config_format"
            ),
            "read for Llama 4 alone, where `config` tells it": (
                "generation_config override_generation_config"
            ),
            _BELOW: "multimodal_config",
            "goes into the configuration of media": (
                "language_model_only limit_mm_per_prompt enable_mm_embeds media_io_kwargs mm_processor_kwargs "
                "mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb "
                "mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype "
                "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin "
                "interleave_mm_strings skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc "
                "mm_ipc_gpu_memory_gb mm_device_do_normalize mm_processor_device"
            ),
        },
        moves_nothing={
            "what is pooled is read behind the last layer": "runner convert pooler_config",
            _TOKENS: (
                "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin "
                "renderer_num_workers"
            ),
            "decides what may be read": (
                "allowed_local_media_path allowed_media_domains hf_token allow_deprecated_quantization"
            ),
            "limits the draft's requests, whose own setting is told": "spec_target_max_model_len",
            _ROUNDS: "enforce_eager disable_cascade_attn",
            _SAMPLES: (
                "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay logits_processors"
            ),
            "limits requests to the window, in which both ways attend to the same": (
                "disable_sliding_window"
            ),
            "the hashes have a digest of given embeddings": "enable_prompt_embeds",
            _SAYS: "served_model_name",
            _PLACES: (
                "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
                "enable_nccl_comm_suspend enable_cumem_allocator"
            ),
        },
    ),
    "MultiModalConfig": Decisions(
        path="model_config.multimodal_config",
        told={
            "overrides": (
                "language_model_only media_io_kwargs mm_processor_kwargs mm_device_do_normalize mm_encoder_attn_dtype "
                "mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method"
            ),
        },
        moves_nothing={
            "decides what may be asked": (
                "limit_per_prompt enable_mm_embeds allow_missing_mm_embeddings"
            ),
            _TOKENS: "interleave_mm_strings",
            "other hashes are other keys": "mm_hasher_algorithm",
            "leaves an engine without K and V": "mm_encoder_only",
            _ROUNDS: "mm_encoder_tp_mode mm_encoder_attn_backend",
            "writes scales for later runs": (
                "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"
            ),
            _PLACES: (
                "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb skip_mm_profiling "
                "mm_tensor_ipc mm_ipc_gpu_memory_gb"
            ),
        },
    ),
    "CacheConfig": Decisions(
        path="cache_config",
        told={
            "block_tokens": "block_size",
            "kv_dtype": (
                "cache_dtype kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype use_replayssm "
                "replayssm_buffer_len kv_sharing_fast_prefill swa_bounded_replay"
            ),
            "hash_algorithm": "prefix_caching_hash_algo",
        },
        follows={
            "read from the layout that vLLM decided on": (
                "kv_cache_layout prefix_match_unit mamba_block_size hash_block_size"
            ),
            "compared with the plan": (
                "mamba_page_size_padded skip_page_size_padded num_gpu_blocks num_gpu_blocks_override"
            ),
            "made of the model and its draft": (
                "is_attention_free sliding_window mamba_cache_mode use_kda_recoverssm"
            ),
        },
        moves_nothing={
            "decides which blocks are findable": (
                "enable_prefix_caching prefix_cache_retention_interval enable_mamba_shared_prefix_checkpoint "
                "cache_hit_alignment_tokens"
            ),
            _PLACES: (
                "gpu_memory_utilization kv_cache_memory_bytes kv_offloading_size kv_offloading_backend num_cpu_blocks"
            ),
            _SAYS: (
                "user_specified_block_size _block_size_resolved effective_attention_block_size kv_cache_size_tokens "
                "kv_cache_max_concurrency"
            ),
        },
    ),
    "ParallelConfig": Decisions(
        path="parallel_config",
        told={
            "ranks": (
                "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size "
                "decode_context_parallel_size cp_kv_cache_interleave_size"
            ),
            "arithmetic": "all2all_backend",
        },
        follows={
            "an older name of cp_kv_cache_interleave_size": "dcp_kv_cache_interleave_size",
            "made of the model and the sizes": "is_moe_model world_size",
        },
        moves_nothing={
            "replicas compute the same": (
                "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local "
                "data_parallel_index data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval rank node_rank "
                "nnodes"
            ),
            _ROUNDS: (
                "enable_hc_sp enable_expert_parallel expert_placement_strategy enable_eplb eplb_config "
                "disable_custom_all_reduce dcp_comm_backend dcp_q_replicate enable_dbo ubatch_size "
                "dbo_decode_token_threshold dbo_prefill_token_threshold"
            ),
            _SAMPLES: "enable_batch_sharded_sampling",
            "decides how weights are read": "enable_ep_weight_filter max_parallel_loading_workers",
            _PLACES: (
                "enable_shm_tensor_arena numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids "
                "placement_group"
            ),
            "whoever brings a worker of their own says in `weights` what it loads": (
                "worker_cls worker_extension_cls"
            ),
            _SPEAKS: (
                "data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port data_parallel_backend "
                "disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env "
                "distributed_executor_backend master_addr master_port distributed_timeout_seconds "
                "cpu_distributed_timeout_seconds _data_parallel_master_port_list _coord_store_port "
                "_api_process_count _api_process_rank _allow_auto_resolve_cp_interleave_size"
            ),
            "decides what happens after a fault": (
                "enable_elastic_ep elastic_ep_max_dp_size enable_fault_tolerance fault_tolerance_config"
            ),
        },
    ),
    "LoadConfig": Decisions(
        path="load_config",
        told={"load_format": "load_format model_loader_extra_config ignore_patterns"},
        moves_nothing={
            "decides how the same files are read": (
                "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
                "safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location"
            ),
        },
    ),
    "AttentionConfig": Decisions(
        path="attention_config",
        told={
            "layout": (
                "backend backend_per_kind use_non_causal flash_attn_version use_trtllm_attention "
                "disable_flashinfer_q_quantization use_prefill_query_quantization indexer_kv_dtype "
                "indexer_sparse_logits"
            ),
        },
        follows={"refused with any connector but its own": "hisparse_config"},
        moves_nothing={
            _ROUNDS: (
                "minimax_m3_msa_decode_backend flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
                "tq_max_kv_splits_for_cuda_graph mla_prefill_backend sparse_mla_force_mqa "
                "sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size "
                "flex_attn_kv_block_size"
            ),
        },
    ),
    "MambaConfig": Decisions(
        path="mamba_config",
        told={"arithmetic": "backend enable_stochastic_rounding stochastic_rounding_philox_rounds"},
        moves_nothing={_ROUNDS: "ssu_algorithm"},
    ),
    "KernelConfig": Decisions(
        path="kernel_config",
        told={"arithmetic": "moe_backend linear_backend linear_backend_per_quant"},
        moves_nothing={
            _ROUNDS: "ir_op_priority sparse_indexer_topk_backend enable_flashinfer_autotune "
            "enable_rocm_segmented_attn_autotune",
            _SCHEDULES: "enable_cutedsl_warmup enable_jit_warmup",
        },
    ),
    "LoRAConfig": Decisions(
        path="lora_config",
        told={
            "adapters": (
                "lora_dtype target_modules default_mm_loras enable_tower_connector_lora enable_mixed_moe_lora_format "
                "enable_moe_shared_loras"
            ),
        },
        moves_nothing={
            _PLACES: "max_lora_rank max_loras max_cpu_loras",
            _ROUNDS: "fully_sharded_loras specialize_active_lora",
            _SAMPLES: "max_lora_cls_labels",
        },
    ),
    "SpeculativeConfig": Decisions(
        path="speculative_config",
        told={
            "draft": (
                "method model revision code_revision quantization kv_cache_dtype attention_backend moe_backend "
                "max_model_len draft_tensor_parallel_size parallel_drafting use_heterogeneous_vocab "
                "index_share_for_mtp_iteration draft_load_config"
            ),
        },
        follows={
            "the engine's own": "target_model_config target_parallel_config",
            "made of the settings above": "draft_model_config draft_parallel_config",
        },
        moves_nothing={
            _ROUNDS: "enforce_eager disable_padded_drafter_batch",
            "the draft reads every token anew once it is accepted": (
                "num_speculative_tokens num_speculative_tokens_per_batch_size"
            ),
            "read by nobody but a warning": "tensor_parallel_size",
            "decides which blocks are findable": "disable_eagle_block_drop",
            "chooses tokens; K and V are those of the tokens": (
                "use_local_argmax_reduction prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth "
                "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob "
                "rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length "
                "enable_adaptive_verification draft_sample_method dspark_draft_topk"
            ),
        },
    ),
    "DiffusionConfig": Decisions(
        path="diffusion_config", told={"arithmetic": "canvas_length max_denoising_steps"}
    ),
    "DeviceConfig": Decisions(
        path="device_config",
        told={"device": "device_type"},
        follows={"device_type is made of it": "device"},
    ),
    "SchedulerConfig": Decisions(
        path="scheduler_config",
        follows={
            "made of the model": (
                "runner_type is_multimodal_model is_encoder_decoder max_model_len"
            ),
            "read from the layout that vLLM decided on": "disable_hybrid_kv_cache_manager",
        },
        moves_nothing={
            _SCHEDULES: (
                "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs "
                "long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_queued_reqs "
                "max_num_queued_tokens enable_chunked_prefill max_num_encoder_input_tokens encoder_cache_size policy "
                "disable_chunked_mm_input scheduler_cls scheduler_reserve_full_isl watermark "
                "prefill_schedule_interval async_scheduling stream_interval"
            ),
        },
    ),
    "CompilationConfig": Decisions(
        path="compilation_config",
        moves_nothing={
            _ROUNDS: (
                "mode backend custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder cudagraph_mm_encoder "
                "compile_sizes compile_ranges_endpoints inductor_compile_config inductor_passes "
                "use_inductor_graph_partition pass_config dynamic_shapes_config fast_moe_cold_start"
            ),
            _SCHEDULES: (
                "encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch "
                "encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay "
                "decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold cudagraph_mode "
                "cudagraph_num_of_warmups cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_specialize_lora "
                "max_cudagraph_capture_size"
            ),
            _SAYS: (
                "debug_dump_path cache_dir compile_cache_save_format local_cache_dir enabled_custom_ops "
                "disabled_custom_ops traced_files compilation_time encoder_compilation_time static_forward_context "
                "static_all_moe_layers"
            ),
        },
    ),
    "environment": Decisions(
        path="",
        told={
            "arithmetic": (
                "VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_BATCH_INVARIANT VLLM_CPU_INT4_W4A8 VLLM_DEEPEPLL_NVFP4_DISPATCH "
                "VLLM_DISABLED_KERNELS VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_FLOAT32_MATMUL_PRECISION "
                "VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_USE_F16_ACCUM "
                "VLLM_MARLIN_INPUT_DTYPE VLLM_MEDIA_CONNECTOR VLLM_MODEL_REDIRECT_PATH "
                "VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_MOE_USE_DEEP_GEMM VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 "
                "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB "
                "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_FP4BMM "
                "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_ROCM_USE_AITER_FP8BMM VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 "
                "VLLM_SSM_CONV_STATE_LAYOUT VLLM_TEST_FORCE_LOAD_FORMAT VLLM_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0 "
                "VLLM_USE_FLASHINFER_MOE_INT4 VLLM_USE_MODELSCOPE VLLM_VIDEO_LOADER_BACKEND "
                "VLLM_XPU_INC_WNA16_BACKEND"
            ),
        },
        follows={
            "decides the layout, which is told, or the pages, which are compared with the plan": (
                "VLLM_KV_CACHE_LAYOUT VLLM_MLA_DISABLE VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE "
                "VLLM_PP_LAYER_PARTITION"
            ),
        },
        moves_nothing={
            _ROUNDS: (
                "VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC VLLM_ALLREDUCE_USE_SYMM_MEM "
                "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_CPU_ATTN_SPLIT_KV VLLM_DBO_COMM_SMS VLLM_DCP_Q_REPLICATE "
                "VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION "
                "VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION VLLM_DISABLE_PYNCCL "
                "VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_ENABLE_GEMM_RS "
                "VLLM_ENABLE_HPC_OPS VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE "
                "VLLM_ENABLE_PREGRAD_PASSES VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS "
                "VLLM_GDN_DECODE_KERNEL VLLM_HUMMING_MOE_GEMM_TYPE VLLM_KIMI_K3_AUX_ATTN_RES_STREAM "
                "VLLM_KIMI_K3_GEMM_AR VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_LORA_DISABLE_PDL "
                "VLLM_LORA_ENABLE_DUAL_STREAM VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE "
                "VLLM_MOE_SKIP_PADDING VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD "
                "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_REPLICATE_EMBED "
                "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS VLLM_ROCM_AITER_MLA_ASM_PADDING "
                "VLLM_ROCM_AITER_MLA_DCP_VERIFY VLLM_ROCM_AITER_MOE_DISPATCH_POLICY VLLM_ROCM_FP8_MFMA_PAGE_ATTN "
                "VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING VLLM_ROCM_MONO_DECODE "
                "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB "
                "VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_LINEAR "
                "VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_MLA "
                "VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_MOE_SITUV2 VLLM_ROCM_USE_AITER_RMSNORM "
                "VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_AITER_TRITON_ROPE "
                "VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION "
                "VLLM_ROCM_USE_SKINNY_GEMM VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD "
                "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_TRITON_USE_TD "
                "VLLM_TUNED_CONFIG_FOLDER VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH "
                "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_DIRECT_DCP_A2A VLLM_USE_DIRECT_DCP_KV_GATHER "
                "VLLM_USE_DIRECT_DCP_Q_GATHER VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_USE_HW_AGNOSTIC "
                "VLLM_USE_NCCL_SYMM_MEM VLLM_USE_OINK_OPS VLLM_USE_STANDALONE_COMPILE VLLM_USE_TRITON_AWQ "
                "VLLM_USE_V2_MODEL_RUNNER VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_ZENTORCH_WEIGHT_PREPACK"
            ),
            "builds, fetches, logs, limits, schedules or connects": (
                "CMAKE_BUILD_TYPE CUDA_HOME CUDA_VISIBLE_DEVICES FORCE_COLOR LD_LIBRARY_PATH LOCAL_RANK MAX_JOBS "
                "MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME NO_COLOR NVCC_THREADS S3_ACCESS_KEY_ID "
                "S3_ENDPOINT_URL S3_SECRET_ACCESS_KEY VERBOSE VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN "
                "VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ALLOW_RUNTIME_LORA_UPDATING "
                "VLLM_API_KEY VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_AUDIO_FETCH_TIMEOUT "
                "VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_CACHE_ROOT "
                "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_COMPUTE_NANS_IN_LOGITS "
                "VLLM_CONFIGURE_LOGGING VLLM_CONFIG_ROOT VLLM_CPU_CI_ENV VLLM_CPU_KVCACHE_SPACE "
                "VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND VLLM_CUDART_SO_PATH "
                "VLLM_CUDA_COMPATIBILITY_PATH VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_DEBUG_DUMP_PATH "
                "VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE "
                "VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE "
                "VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL VLLM_DEEP_GEMM_WARMUP VLLM_DISABLE_COMPILE_CACHE "
                "VLLM_DISABLE_LOG_LOGO VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_DISTRIBUTED_USE_SPLIT_GROUP "
                "VLLM_DOCKER_BUILD_CONTEXT VLLM_DO_NOT_TRACK VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK "
                "VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT "
                "VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ENABLE_COHERE_API "
                "VLLM_ENABLE_CUDAGRAPH_GC VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_ENABLE_RESPONSES_API_STORE "
                "VLLM_ENABLE_STARTUP_PLAN VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ENFORCE_STRICT_TOOL_CALLING "
                "VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_FASTSAFETENSORS_QUEUE_SIZE "
                "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_FORCE_AOT_LOAD "
                "VLLM_GC_DEBUG VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS "
                "VLLM_GPU_NIC_PCIE_MAPPING VLLM_GPU_SYNC_CHECK VLLM_HAS_FLASHINFER_CUBIN VLLM_HOST_IP "
                "VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_IMAGE_FETCH_TIMEOUT VLLM_IMAGE_TAG VLLM_KEEP_ALIVE_ON_ENGINE_DEATH "
                "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_LOGGING_COLOR "
                "VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM "
                "VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION VLLM_LOG_STATS_INTERVAL VLLM_LOOPBACK_IP "
                "VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_MAIN_CUDA_VERSION "
                "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_DECODE_DURATION_S "
                "VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS "
                "VLLM_MAX_EMBED_DECODE_BYTES VLLM_MAX_IMAGE_PIXELS VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB "
                "VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS VLLM_MEDIA_CACHE "
                "VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_FETCH_MAX_RETRIES "
                "VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS "
                "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT "
                "VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO "
                "VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_STORE_TIER_LOG VLLM_MQ_MAX_CHUNK_BYTES_MB "
                "VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH VLLM_NIC_SELECTION_VARS "
                "VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_NO_USAGE_STATS "
                "VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_P2P_HANDSHAKE_TIMEOUT_S "
                "VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT "
                "VLLM_PATTERN_MATCH_DEBUG VLLM_PLUGINS VLLM_PORT VLLM_PROCESS_NAME_PREFIX VLLM_RAISE_ON_LOGIT_NANS "
                "VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY "
                "VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VARS_TO_COPY "
                "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_PER_WORKER_GPUS VLLM_REGEX_COMPILATION_TIMEOUT_S "
                "VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_RPC_BASE_PATH "
                "VLLM_RUST_FRONTEND_PATH VLLM_SERVER_DEV_MODE VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_SKIP_P2P_CHECK "
                "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX VLLM_SYSTEM_START_DATE "
                "VLLM_TARGET_DEVICE VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS "
                "VLLM_TPU_USING_PATHWAYS VLLM_TRACE_FUNCTION VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_USAGE_SOURCE "
                "VLLM_USAGE_STATS_SERVER VLLM_USE_BYTECODE_HOOK VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT "
                "VLLM_USE_FASTOKENS VLLM_USE_FLASHINFER_SAMPLER VLLM_USE_LAYERNAME VLLM_USE_MEGA_AOT_ARTIFACT "
                "VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE "
                "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM "
                "VLLM_USE_RUST_BENCH VLLM_USE_RUST_FRONTEND VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_USE_SPINLOOP_EXT "
                "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_V1_USE_OUTLINES_CACHE VLLM_VIDEO_FETCH_TIMEOUT "
                "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA "
                "VLLM_WORKER_MULTIPROC_METHOD VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_WSL2_ENABLE_PIN_MEMORY "
                "VLLM_XGRAMMAR_CACHE_MB VLLM_XLA_CACHE_PATH VLLM_XLA_CHECK_RECOMPILATION VLLM_XLA_USE_SPMD "
                "VLLM_XPU_PP_MICROBATCH VLLM_XPU_USE_SAMPLER_KERNEL"
            ),
        },
    ),
}
"""The classes whose settings may change a byte, by name; and `vllm.envs`, vLLM's variables of the environment."""
