"""Own the truth that the demo is compared with: plain Transformers, no kvlease, in a process of its own."""

import json
import sys

import torch
import workload


def main() -> None:
    """Print one JSON line a request: its id and the tokens that follow its prompt."""
    model = workload.build_model()
    parts = workload.requests(is_quick="--quick" in sys.argv)
    for request in (request for part in parts.values() for request in part):
        prompt = torch.tensor([request.token_ids])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
        )
        tokens = output[0, prompt.shape[1] :].tolist()
        print(json.dumps({"request_id": request.request_id, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
