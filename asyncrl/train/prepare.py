"""Makes the model folder a run starts from, in a child: the model function, then the warm-up, cached by what they depend on."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, RunAborted
from asyncrl.functions import load_function, source_file
from asyncrl.tokenizer import Tokenizer
from asyncrl.train.prepare_config import CrossEntropyWarmUp, ModelConfig, ModelFolder, ModelFunction, NoWarmUp, WarmUpConfig


def cache_key(model: ModelConfig, warm_up: WarmUpConfig) -> str:
    """Changes with every setting, with the source the named functions are in, with the files of a model folder, and with this file."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for section in (model, warm_up):
        digest.update(section.model_dump_json().encode())
        for name in ("function", "examples", "held_out"):
            source = source_file(getattr(section, name, ""))
            digest.update(source.read_bytes() if source else b"")
    if isinstance(model, ModelFolder):
        for path in sorted(Path(model.path).rglob("*")):
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def serve(channel: Any, spec: dict[str, Any]) -> None:
    """Child entry: spec holds `model`, `warm_up` and `folder`; streams what is under way as `told`, then what was done."""
    from pydantic import TypeAdapter

    from asyncrl.channel import serve_calls

    model = TypeAdapter(ModelConfig).validate_python(spec["model"])
    warm_up = TypeAdapter(WarmUpConfig).validate_python(spec["warm_up"])

    def answer(request: Any) -> dict[str, float]:
        def tell(text: str) -> None:
            print(text)  # into the log, where those look who watch from outside
            channel.reply(request.id, {"told": text}, last=False)

        return prepare(model, warm_up, folder=Path(spec["folder"]), tell=tell)

    channel.ready({})
    serve_calls(channel, {"prepare": answer})


def prepare(model: ModelConfig, warm_up: WarmUpConfig, *, folder: Path, tell: Callable[[str], None] = print) -> dict[str, float]:
    """Write the prepared model to `folder` (appears whole or not at all). Returns steps, accuracy and loss of the warm-up.

    `tell` gets a line at every check of the warm-up.

    Where another run has finished the same folder meanwhile, that one stays. Raises ConfigError for a missing model or examples that
    end, RunAborted when the accuracy is not reached.
    """
    building = building_folder(folder, pid=os.getpid())
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        if isinstance(model, ModelFunction):
            load_function(model.function, field="model.function")(building, **model.arguments)
        elif Path(model.path).is_dir():
            shutil.copytree(model.path, building, dirs_exist_ok=True)
        else:
            raise ConfigError("model.path", value=model.path, allowed="an existing Hugging Face model folder",
                              remedy="Download the model first; a recipe's paths are looked for beside it, then in the working folder.")
        report = {} if isinstance(warm_up, NoWarmUp) else _warm_up(building, warm_up, tell=tell)
        folder.with_suffix(".json").write_text(json.dumps(report))
        _publish(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return report


def building_folder(folder: Path, *, pid: int) -> Path:
    """Where process `pid` builds `folder`. Whoever kills it removes this one: a killed process cannot."""
    return folder.with_name(f"{folder.name}.{pid}")


def _publish(building: Path, folder: Path) -> None:
    try:
        os.replace(building, folder)
    except OSError:
        if not folder.is_dir():
            raise


def _warm_up(folder: Path, config: CrossEntropyWarmUp, *, tell: Callable[[str], None]) -> dict[str, float]:
    import torch

    from asyncrl.causal_lm import load_causal_lm

    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    net = load_causal_lm(folder, dtype=torch.float32)
    tokenizer = _Examples(folder, eos_token=_end_of_sequence(net.generation_config.eos_token_id, folder))
    examples = iter(load_function(config.examples, field="warm_up.examples")(seed=config.seed, **config.arguments))
    held_out = tokenizer.rows(load_function(config.held_out, field="warm_up.held_out")(seed=config.seed, **config.arguments),
                              field="warm_up.held_out")
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=0.0)
    accuracy = 0.0
    for step in range(1, config.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, step / max(1, config.ramp_steps))
        batch = tokenizer.rows(itertools.islice(examples, config.batch_size), field="warm_up.examples")
        loss = -completion_logprobs(net, batch).sum() / (batch[1] >= 0).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if step % config.check_every_steps == 0 or step == config.max_steps:
            accuracy = _accuracy(net, held_out, batch_size=config.batch_size)
            tell(f"warm-up step {step}: accuracy {accuracy:.3f} of {config.until_accuracy:g}, loss {float(loss.detach()):.3f}")
            if accuracy >= config.until_accuracy:
                net.save_pretrained(folder)
                return {"steps": step, "accuracy": accuracy, "loss": float(loss.detach())}
    raise RunAborted(f"warm_up.until_accuracy = {config.until_accuracy} was not reached in max_steps = {config.max_steps} "
                     f"(reached {accuracy:.3f}): raise max_steps, or ask for less")


def _accuracy(net: Any, held_out: tuple[Any, Any], *, batch_size: int) -> float:
    """Mean probability of the held-out completions, forwarded as many at once as the examples are: one forward set the child's peak."""
    import torch

    with torch.no_grad():
        parts = zip(*(rows.split(batch_size) for rows in held_out), strict=True)
        return float(torch.cat([completion_logprobs(net, part).sum(-1).exp() for part in parts]).mean())


def _end_of_sequence(eos_tokens: int | list[int] | None, folder: Path) -> int:
    """The token engines stop at, the first of several."""
    if eos_tokens is None or eos_tokens == []:
        raise ConfigError("model", value=str(folder), allowed="a generation_config.json with an eos_token_id",
                          remedy="Set model.generation_config.eos_token_id before the model is saved.")
    return eos_tokens if isinstance(eos_tokens, int) else eos_tokens[0]


class _Examples:
    """Turns (prompt, completion) texts into right-padded rows; the completion ends with the end-of-sequence token."""

    def __init__(self, folder: Path, *, eos_token: int) -> None:
        self._tokenizer = Tokenizer(folder)
        self._eos_token = eos_token

    def rows(self, pairs: Iterable[tuple[str, str]], *, field: str) -> tuple[Any, Any]:
        """tokens [N, L] int64 and labels [N, L] int64, −1 where nothing is learned. Raises ConfigError when there is no pair."""
        import torch

        encoded = [(self._tokenizer.encode(prompt), self._tokenizer.encode_rest(completion)) for prompt, completion in pairs]
        if not encoded:
            raise ConfigError(field, value="no more pairs", allowed="endless examples, and at least one held-out pair",
                              remedy="Start again at the end of the data (itertools.cycle).")
        width = max(len(prompt) + len(completion) + 1 for prompt, completion in encoded)
        tokens = torch.full((len(encoded), width), self._eos_token)
        labels = torch.full((len(encoded), width), -1)
        for row, (prompt, completion) in enumerate(encoded):
            ids = torch.tensor([*prompt, *completion, self._eos_token])
            tokens[row, :len(ids)] = ids
            labels[row, len(prompt):len(ids)] = ids[len(prompt):]
        return tokens, labels


def completion_logprobs(model: Any, batch: tuple[Any, Any]) -> Any:
    """[N, L − 1] float32 logprob of each label at temperature 1, 0 where the label is −1. Right padding, causal attention."""
    tokens, labels = batch
    targets = labels[:, 1:]
    logprobs = model(input_ids=tokens).logits[:, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (targets >= 0)
