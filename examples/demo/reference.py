"""Own the truth that the demo is compared with: plain Transformers, no kvlease, in a process of its own."""

import argparse
import json

import torch
import workload


def main() -> None:
    """Print one JSON line a request: its id and the tokens that follow its prompt."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", required=True)
    told = parser.parse_args()
    model = workload.build_model(told.device)
    parts = workload.requests(is_quick=told.quick)
    for request in (request for part in parts.values() for request in part):
        prompt = torch.tensor([request.token_ids], device=told.device)
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
