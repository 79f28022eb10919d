"""Ask the reference engine about random configurations and compare: `python tests/vllm/run.py [COUNT [SEED]]`.

Prints all differences and a count; exits with 1 if one has no recorded reason. Then it checks the connectors' way
over the same plans: from the engine's finished configuration back to a plan's inputs.
"""

import json
import os
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
    return int(differing + _disagreeing(answered) > 0)


def _disagreeing(content: dict[str, Any]) -> int:
    """Count the plans that the connectors' inputs do not reproduce, although planning left the layers unchanged.

    Layers to which the engine gave other blocks or pages may be planned differently; a connector then says so.
    """
    plans = [vector for vector in content["vectors"] if vector["op"] == "plan"]
    answers = _asked("agree.py", {**content, "vectors": plans})
    kinds = Counter(_outcome(answer) for answer in answers.values())
    sys.stdout.write(f"inputs from the engine's configuration: {dict(kinds.most_common())}\n")
    wrong = {name: answer for name, answer in answers.items() if _outcome(answer) == "wrong"}
    for name, answer in wrong.items():
        sys.stdout.write(json.dumps({"id": name, **answer}, ensure_ascii=False) + "\n")
    return len(wrong)


def _outcome(answer: dict[str, Any]) -> str:
    if "reference" in answer:
        return "refused by the engine"
    if answer.get("refused") == "ranks_unknown":
        return "refused for several stages"
    if answer.get("agreed"):
        return "agreed"
    if "scheduler" in answer:
        return "agreed, by workers alone"
    return "said to differ" if answer["is_changed"] else "wrong"


def _answered(content: dict[str, Any]) -> dict[str, Any]:
    """Return the vectors with the reference's answers, all from one process."""
    return _asked("record.py", content)


def _asked(script: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return the output of a script that runs with the reference's interpreter."""
    paths = [str(_ROOT / "client"), str(_ROOT / "service")]
    recorded = subprocess.run(
        [_REFERENCE, Path(__file__).with_name(script)],
        input=json.dumps(content),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
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
