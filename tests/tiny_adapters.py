"""Low-rank adapters with random weights for the model of tiny_model.py, in PEFT's format."""

import json
from itertools import product
from pathlib import Path

SIZES = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (32, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}


def write_adapter(folder: Path, seed: int, rank: int = 4) -> Path:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer, (name, (outputs, inputs)) in product(range(2), SIZES.items()):
        module = f"base_model.model.model.layers.{layer}.{name}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw) * 0.3
        tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(SIZES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_three(folder: Path) -> Path:
    """Adapters "one", "two" and "three" of three ranks."""
    for number, name in enumerate(("one", "two", "three")):
        write_adapter(folder / name, number, rank=2 + 3 * number)
    return folder
