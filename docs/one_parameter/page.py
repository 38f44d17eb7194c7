"""The page: `page.template.md` with the numbers of a trace in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from one_parameter.checks import Check, checks

_TEMPLATE = Path(__file__).with_name("page.template.md")


class Number:
    """A float32 or bfloat16 as the page shows it: shortest digits, then bits."""

    def __init__(self, traced: dict[str, Any]) -> None:
        self.value, self._bits = traced["value"], traced["bits"]

    def __str__(self) -> str:
        return f"{self.value!r:<16} {self._bits}"


def render(trace: dict[str, Any]) -> str:
    """The whole page. In the template, `{8[weight]}` is what step 8 traced under that name."""
    steps = {int(number): step for number, step in trace["steps"].items()}
    found = checks(trace)
    lines = {number: _lines([check for check in found if check.step == number]) for number in steps}
    shown = _shown(trace)
    return _TEMPLATE.read_text(encoding="utf-8").format(
        None, *(shown["steps"][str(number)] for number in sorted(steps)), element=trace["element"], made_with=trace["made_with"],
        checks=lines, count=len(found), exact=sum(check.allowed == 0 for check in found), **_words(steps))


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return Number(value) if set(value) == {"value", "bits"} else {name: _shown(inner) for name, inner in value.items()}
    return [_shown(inner) for inner in value] if isinstance(value, list) else value


def _lines(found: Sequence[Check]) -> str:
    return "\n".join(f"* ✓ {check.claim}: {'equal' if check.allowed == 0 else f'{check.gap:.1e}'}" for check in found)


def _words(steps: dict[int, Any]) -> dict[str, str]:
    """What depends on a sign."""
    judged, update = steps[6], steps[10]
    fell, unwanted = steps[12]["probability"] < steps[5]["probability"], judged["advantage"]["value"] < 0
    against = update["clipped_gradient"]["value"] * update["first_moment"][1]["value"] < 0
    limit = f"{update['max_grad_norm']:g}"
    return {
        "rewards": ", ".join(f"{reward:.3g}" for reward in judged["rewards"]),
        "side": "below" if unwanted else "above", "wanted": "less" if unwanted else "more", "became": "less" if fell else "more",
        "verdict": "as its advantage asked" if fell == unwanted else "against its own advantage: the other tokens had their say",
        "clipping": f"and scaled down to {limit}" if update["factor"] < 1 else f"below the limit of {limit}",
        "momentum": ("In the first moment the gradients before still outweigh this one: the element goes on in its old direction."
                     if against else "Gradient and first moment point the same way, and the element follows."),
    }
