"""Ask the reference engine about random configurations and compare: `python tests/vllm/run.py [COUNT [SEED]]`.

Prints what differs, and a count; exits with 1 if anything differs without a reason on record.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT))

from tests.golden.run import judge  # noqa: E402  # only now is the project's root known
from tests.vllm.configurations import vectors  # noqa: E402

_COUNT = 600
_SEED = 20_260_000
_REFERENCE = _ROOT / ".venv-vllm" / "bin" / "python"


def main(arguments: list[str]) -> int:
    """Record, compare and report."""
    count, seed = (*map(int, arguments), *(_COUNT, _SEED)[len(arguments) :])
    answered = _answered(vectors(count, seed))
    verdicts = [judge(vector) for vector in answered["vectors"]]
    for verdict in verdicts:
        if not verdict["ok"]:
            sys.stdout.write(json.dumps({**verdict, "got": "…"}, ensure_ascii=False) + "\n")
    differing = sum(not verdict["ok"] for verdict in verdicts)
    reasons = Counter(verdict["why"] for verdict in verdicts if verdict["ok"] and "why" in verdict)
    for reason, times in sorted(reasons.items()):
        sys.stdout.write(f"{times} {reason}\n")
    answers = Counter(_kind(vector["expected"]) for vector in answered["vectors"])
    sys.stdout.write(f"the reference answered: {dict(answers.most_common())}\n")
    sys.stdout.write(
        f"{len(verdicts)} questions about {count} models, seed {seed}: {differing} differ without a reason\n"
    )
    return int(differing > 0)


def _answered(content: dict[str, Any]) -> dict[str, Any]:
    """Return the vectors with the reference's answers, all from one process."""
    recorded = subprocess.run(
        [_REFERENCE, Path(__file__).with_name("record.py")],
        input=json.dumps(content),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answered: dict[str, Any] = json.loads(recorded.stdout)
    return answered


def _kind(expected: dict[str, Any]) -> str:
    return str(expected["error"]["class"]) if "error" in expected else "an answer"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
