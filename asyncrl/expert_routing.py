"""Where a mixture of experts sends each token: recorded in one forward, repeated in another, for engines and trainer alike.

Routers differ from model to model in what they make of their logits, before the choice (softmax or sigmoid, biases, groups) and after it
(normalised or not). All end in one topk over the experts. It is found once, by a forward; from then on the module that calls it is watched,
and in a replay this call answers with the recorded experts and with its own scores of them: what the router makes of them is its own
code, and its logits get their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError, ShapeError
from asyncrl.model_folder import expert_counts

_TOPK = (torch.topk, Tensor.topk)


class Routing:
    """The L routers of a model, in the order of its layers, each of which sends a token to k experts.

    Args:
        lm: the model.
        forward: runs it once, on any tokens.

    Raises ConfigError for a model without experts, or whose routers choose in another way.
    """

    def __init__(self, lm: PreTrainedModel, *, forward: Callable[[], Any]) -> None:
        counts = expert_counts(lm.config.get_text_config().to_dict())
        if counts is None:
            raise _refused(f"{type(lm).__name__}, which has no experts")
        self.experts, self.experts_per_token = counts
        self._rows = 0
        self._recorded: dict[int, Tensor] | None = None
        self._replay: Tensor | None = None
        self._flips: dict[int, Tensor] = {}
        self._flipped: Tensor | None = None
        self._known: Tensor | None = None
        self._watches: list[_Watch] = []
        routers = self._found(lm, forward)
        if len(set(routers)) != len(routers) or not routers:
            raise _refused(f"{type(lm).__name__}, whose layers do not each choose {self.experts_per_token} of {self.experts} experts once")
        self.layers = len(routers)
        for layer, router in enumerate(routers):
            router.register_forward_pre_hook(lambda *_, layer=layer: self._enter(layer))
            router.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def begin(self) -> None:
        """Record what the next forward chooses."""
        self._recorded = {}

    def end(self) -> NDArray[np.int16]:
        """[tokens, L, k] experts of the forward since `begin`, every token it was given in a row."""
        recorded, self._recorded = self._recorded or {}, None
        assert len(recorded) == self.layers, "one forward lies between begin() and end()"
        return torch.stack([recorded[layer] for layer in range(self.layers)], dim=1).to(torch.int16).cpu().numpy()

    def replay(self, experts: Tensor | None, *, rows: int) -> None:
        """What the next forward, and whatever computes it again for a gradient, sends its tokens to.

        `experts` is [rows, L, k] int16, negative where the router is to choose for itself; None for all of them. Raises ShapeError for the
        experts of another model.
        """
        self._fold()
        self._rows += rows
        self._replay = experts
        if experts is None:
            return
        if experts.shape != (rows, self.layers, self.experts_per_token):
            raise ShapeError(f"experts of shape {tuple(experts.shape)} were recorded for {rows} tokens; the model has {self.layers} layers "
                             f"that choose {self.experts_per_token}")
        known = (experts[:, 0, 0] >= 0).sum().double()
        self._known = known if self._known is None else self._known + known

    def counted(self, device: torch.device) -> Tensor:
        """[3] float64 of the forwards since the last call: tokens; those of them that were replayed; and how many of these, a choice of one
        expert in one layer being a share of a token, would now be sent elsewhere."""
        self._fold()
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        flipped = nothing if self._flipped is None else self._flipped / (self.layers * self.experts_per_token)
        counts = torch.stack([nothing + self._rows, nothing if self._known is None else self._known, flipped])
        self._rows, self._known, self._flipped = 0, None, None
        return counts

    def choose(self, layer: int, scores: Tensor, own: Any) -> Any:
        """What the topk of a layer's router answers, of its scores [tokens, experts] and its own choice."""
        if self._recorded is not None:
            self._recorded[layer] = own.indices.detach()
        if self._replay is None:
            return own
        recorded = self._replay[:, layer].long()
        is_known = recorded >= 0
        chosen = torch.where(is_known, recorded, own.indices)
        differs = (recorded[..., :, None] != own.indices[..., None, :]).all(dim=-1) & is_known
        self._flips[layer] = differs.sum().detach()
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    def is_choice(self, function: Any, scores: Tensor, own: Any) -> bool:
        """Whether a call is a topk over the experts; those that score groups of them have a dimension more."""
        return function in _TOPK and scores.dim() == 2 and (scores.shape[1], own.indices.shape[1]) == (self.experts, self.experts_per_token)

    def _fold(self) -> None:
        """A layer that is computed again for its gradient says the same again, so what it said last counts once."""
        if self._flips:
            total = torch.stack(list(self._flips.values())).sum().double()
            self._flipped = total if self._flipped is None else self._flipped + total
            self._flips = {}

    def _enter(self, layer: int) -> None:
        if self._recorded is not None or self._replay is not None:
            watch = _Watch(lambda scores, own: self.choose(layer, scores, own), self.is_choice)
            watch.__enter__()
            self._watches.append(watch)

    def _leave(self) -> None:
        if self._watches:
            self._watches.pop().__exit__(None, None, None)

    def _found(self, lm: PreTrainedModel, forward: Callable[[], Any]) -> list[nn.Module]:
        """The modules whose own forward chooses, in the order in which they do."""
        inside: list[nn.Module] = []
        routers: list[nn.Module] = []

        def noted(_: Tensor, own: Any) -> Any:
            routers.append(inside[-1])
            return own

        hooks = [hook for module in lm.modules() for hook in (
            module.register_forward_pre_hook(lambda module, _: inside.append(module)),
            module.register_forward_hook(lambda *_: inside.pop() and None, always_call=True))]
        try:
            with torch.no_grad(), _Watch(noted, self.is_choice):
                forward()
        finally:
            for hook in hooks:
                hook.remove()
        return routers


class _Watch(TorchFunctionMode):
    """Lets `answer` answer what `is_choice` says is a choice of experts."""

    def __init__(self, answer: Callable[[Tensor, Any], Any], is_choice: Callable[[Any, Tensor, Any], bool]) -> None:
        super().__init__()
        self._answer, self._is_choice = answer, is_choice

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        return self._answer(scores, result) if self._is_choice(func, scores, result) else result


@contextmanager
def recorded(routing: Routing | None) -> Iterator[list[NDArray[np.int16]]]:
    """Puts the experts of the one forward inside into the list; nothing without a routing."""
    found: list[NDArray[np.int16]] = []
    if routing is not None:
        routing.begin()
    yield found
    if routing is not None:
        found.append(routing.end())


def _refused(value: str) -> ConfigError:
    return ConfigError("trainer.routing_replay, model", value=(True, value),
                       allowed="a mixture of experts whose routers choose by one topk over their experts",
                       remedy="Leave trainer.routing_replay out, or choose another model.")
