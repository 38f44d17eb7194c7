import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.errors import NonFiniteError, WeightSyncError
from asyncrl.weights.codec import word_dtype
from asyncrl.weights.manifest import merge
from asyncrl.weights.piece_bits import Span
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.receiver import Receiver, joined
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.torch_pieces import bits_of, checkpoint_tensors, local_bits, local_pieces, memory_targets


def tiny_model(seed, *, tie, dtype=torch.float32):
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=8, tie_word_embeddings=tie)
    return Qwen3ForCausalLM(config).to(dtype).eval()


def publish(model, publisher, store, *, version, base, dtype="bfloat16"):
    publication = publisher.publish(local_bits(model, rank=0, dtype=dtype), version=version, base=base)
    manifest = merge([publication], run_epoch=0, version=version, base=base)
    store.commit(manifest)
    publisher.committed(version)
    return manifest


@pytest.mark.parametrize("tie", [True, False])
def test_names_are_those_of_a_saved_checkpoint(tmp_path, tie):
    from safetensors import safe_open

    model = tiny_model(0, tie=tie)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        assert set(checkpoint_tensors(model)) == set(saved.keys())
    assert ("lm_head.weight" in checkpoint_tensors(model)) is not tie


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("runtime", [torch.bfloat16, torch.float32])
def test_a_delta_synced_model_equals_the_trained_one_rounded(tmp_path, tie, runtime):
    trained, engine = tiny_model(0, tie=tie), tiny_model(1, tie=tie, dtype=runtime)
    store = StoreTransport(tmp_path)
    publisher = Publisher(local_pieces(trained, rank=0, dtype="bfloat16"), rank=0, sink=store)
    receiver = Receiver(memory_targets(checkpoint_tensors(engine)), source=store)
    receiver.apply(publish(trained, publisher, store, version=0, base=None))
    for version in range(1, 4):
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.add_(torch.randn_like(parameter) * 1e-4)
        manifest = publish(trained, publisher, store, version=version, base=version - 1)
        assert 0 < manifest.density < 1
        assert receiver.apply(manifest) == joined([receiver.audit()])
    expected = {name: tensor.to(torch.bfloat16).to(runtime) for name, tensor in trained.state_dict().items()}
    actual = engine.state_dict()
    assert all(np.array_equal(bits_of(actual[name]), bits_of(expected[name])) for name in expected)
    assert (engine.lm_head.weight is engine.model.embed_tokens.weight) is tie
    fresh = tiny_model(2, tie=tie, dtype=runtime)
    fresh.load_state_dict(expected)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(engine(tokens).logits, fresh(tokens).logits)  # the head, tied or not, is no step behind


def test_a_float32_publication_into_a_bf16_runtime_is_refused(tmp_path):
    trained, engine = tiny_model(0, tie=True), tiny_model(1, tie=True, dtype=torch.bfloat16)
    store = StoreTransport(tmp_path)
    publisher = Publisher(local_pieces(trained, rank=0, dtype="float32"), rank=0, sink=store)
    with pytest.raises(WeightSyncError, match="published as F32, which does not fit BF16"):
        Receiver(memory_targets(checkpoint_tensors(engine)), source=store).apply(
            publish(trained, publisher, store, version=0, base=None, dtype="float32"))


def test_a_float32_publication_keeps_every_bit(tmp_path):
    trained, engine = tiny_model(0, tie=True), tiny_model(1, tie=True)
    store = StoreTransport(tmp_path)
    publisher = Publisher(local_pieces(trained, rank=0, dtype="float32"), rank=0, sink=store)
    anchor = publish(trained, publisher, store, version=0, base=None, dtype="float32")
    Receiver(memory_targets(checkpoint_tensors(engine)), source=store).apply(anchor)
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), engine.parameters(), strict=True))


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 1.00390625, 1.01171875, -0.0]))
        self.register_buffer("inv_freq", torch.tensor([1.00390625]))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def staged(bits):
    """Dtype and bits of every piece."""
    found = {}
    for number, piece in enumerate(bits.pieces):
        out = np.empty(piece.length, word_dtype(piece.dtype))
        bits.stage([Span(number, 0, piece.length)], out)
        found[piece.name] = (piece.dtype, out.tolist())
    return found


def test_parameters_are_rounded_to_nearest_even_and_buffers_left_alone():
    # 1 + 2^-8 lies half-way between two bf16 neighbours and goes to the even one below, 1 + 3·2^-8 to the even one above
    assert staged(local_bits(Odd(), rank=0, dtype="bfloat16")) == {
        "weight": ("BF16", [0x3F80, 0x3F80, 0x3F82, 0x8000]), "inv_freq": ("F32", [0x3F808000]), "steps": ("I64", [3]),
        "flags": ("BOOL", [1, 0])}


def test_a_plain_model_is_published_by_rank_0_alone():
    assert local_pieces(Odd(), rank=1, dtype="bfloat16") == ()
    assert [(piece.name, piece.shape, piece.length) for piece in local_pieces(Odd(), rank=0, dtype="bfloat16")] == [
        ("weight", (4,), 4), ("inv_freq", (1,), 1), ("steps", (), 1), ("flags", (2,), 2)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_what_is_not_finite_as_published_is_not_published(tmp_path, value):
    # 3.4e38 is finite in float32 and rounds to infinity in bf16
    model = Odd()
    with torch.no_grad():
        model.weight[2] = value
    pieces = local_pieces(model, rank=0, dtype="bfloat16")
    publisher = Publisher(pieces, rank=0, sink=StoreTransport(tmp_path))
    with pytest.raises(NonFiniteError, match="weight holds a value that is not finite as BF16"):
        publisher.publish(local_bits(model, rank=0, dtype="bfloat16"), version=0, base=None)


def test_bits_share_the_memory_of_contiguous_tensors():
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    bits_of(tensor)[4] = 0x3F80
    assert tensor[1, 1] == 1.0


def test_state_that_is_no_tensor_is_refused():
    class Extra(Odd):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(WeightSyncError, match="_extra_state is a dict"):
        checkpoint_tensors(Extra())


def test_a_model_without_values_is_refused_by_name():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(WeightSyncError, match="weight is on the meta device"):
        local_pieces(model, rank=0, dtype="bfloat16")
