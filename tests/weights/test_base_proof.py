import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from asyncrl.errors import WeightSyncError
from asyncrl.weights.base_proof import prove_base, saved_tensors
from asyncrl.weights.routes import record_routes


class Fused(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.both = nn.Parameter(torch.zeros(6, 4, dtype=dtype))

    def load_weights(self, weights):
        for name, tensor in weights:
            self.both.data.narrow(0, {"a": 0, "b": 2}[name], len(tensor)).copy_(tensor)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    tensors = {"a": torch.randn(2, 4), "b": torch.randn(4, 4)}
    tensors["a"][0, 0], tensors["a"][0, 1] = float("nan"), -0.0
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_holds_the_folders_values_in_its_own_dtype_passes(saved, dtype):
    folder, tensors = saved
    model = Fused(dtype)
    model.load_weights(tensors.items())
    targets = record_routes(model, load=model.load_weights, tensors=saved_tensors(folder)).routed
    assert prove_base(targets, folder=folder) == 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("row", "column", "value", "reason"), [
    (3, 2, 7.0, "b: 1 values in the runtime model are not those of model.safetensors, the first at flat index 6"),
    (0, 1, 0.0, "a: 1 values .* flat index 1")])
def test_one_bit_of_difference_is_found_and_named(saved, dtype, row, column, value, reason):
    folder, tensors = saved
    model = Fused(dtype)
    model.load_weights(tensors.items())
    targets = record_routes(model, load=model.load_weights, tensors=saved_tensors(folder)).routed
    model.both.data[row, column] = value
    with pytest.raises(WeightSyncError, match=reason):
        prove_base(targets, folder=folder)


def test_headers_give_names_shapes_and_dtypes_without_data(saved):
    folder, tensors = saved
    found = saved_tensors(folder)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    assert {tensor.device.type for tensor in found.values()} == {"meta"}


def test_an_index_says_which_files_count(saved):
    folder, tensors = saved
    save_file(tensors, folder / "consolidated.safetensors")
    with pytest.raises(WeightSyncError, match=r"a is in model.safetensors and in another file"):
        saved_tensors(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    assert set(saved_tensors(folder)) == {"a", "b"}
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(WeightSyncError, match="cannot be read"):
        saved_tensors(folder)


def test_a_folder_without_whole_files_of_known_dtypes_is_refused(tmp_path):
    with pytest.raises(WeightSyncError, match="holds no safetensors file"):
        saved_tensors(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x08")
    with pytest.raises(WeightSyncError, match=r"model\.safetensors cannot be read"):
        saved_tensors(tmp_path)
    save_file({"a": torch.zeros(2).to(torch.float8_e4m3fn)}, path)
    with pytest.raises(WeightSyncError, match=r"a in model\.safetensors is of dtype F8_E4M3"):
        saved_tensors(tmp_path)
