"""The public models that models.py trains: tiny, with random weights and random batches, from installed packages."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCHES, SIZE, TOKENS, VOCABULARY, CLASSES, SIDE = 4, 4, 12, 64, 5, 32
# Arguments of transformers' configurations. A configuration gets those that it has.
TINY = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "embedding_size": 16,
    "rotary_dim": 8,
    "head_dim": 8,
    "intermediate_size": 48,
    "d_ff": 48,
    "n_inner": 48,
    "ffn_dim": 48,
    "d_kv": 8,
    "moe_intermediate_size": 16,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "image_size": SIDE,
    "patch_size": 8,
    "num_labels": CLASSES,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 4),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "local_radius": 4,
    "global_block_size": 4,
}
SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 4}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
MOBILENET = {"depth_multiplier": 0.1, "min_depth": 4}
HIERARCHIES = {  # image models with stages
    "swin": SWIN,
    "swinv2": SWIN,
    "donut-swin": SWIN,
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8},
    "convnext": CONVNEXT,
    "convnextv2": CONVNEXT,
    "poolformer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "van": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "bit": {"embedding_size": 32, "hidden_sizes": [32, 32], "depths": [1, 1], "num_groups": 4},
    "pvt": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]},
    "mobilenet_v1": MOBILENET,
    "mobilenet_v2": MOBILENET,
}
# Kind of a head -> the table of transformers with its classes.
HEADS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
CONVOLUTIONS = [
    "GCNConv",
    "SAGEConv",
    "GraphConv",
    "GATConv",
    "GATv2Conv",
    "TransformerConv",
    "TAGConv",
    "ChebConv",
    "ARMAConv",
    "SGConv",
    "MFConv",
    "GENConv",
    "ClusterGCNConv",
    "LEConv",
    "FiLMConv",
    "SuperGATConv",
    "ResGatedGraphConv",
    "EGConv",
]
VISION = ("VisionTransformer", "SwinTransformer", "ConvNeXt", "DenseNet", "ShuffleNetV2", "MobileNetV2", "MNASNet")
GRAPH_MODELS = ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN")
TIMM = [
    "test_byobnet",
    "test_coatnet",
    "test_convnext",
    "test_convnext2",
    "test_convnext3",
    "test_efficientnet",
    "test_efficientnet_evos",
    "test_efficientnet_gn",
    "test_efficientnet_ln",
    "test_mambaout",
    "test_maxvit",
    "test_nfnet",
    "test_resnet",
    "test_vit",
    "test_vit2",
    "test_vit3",
    "test_vit4",
    "test_vit_relpos",
]
WRITTEN = {  # x-transformers: name -> options of its decoder
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "T5 bias": {"rel_pos_bias": True},
    "ALiBi": {"alibi_pos_bias": True},
    "RMSNorm": {"use_rmsnorm": True},
    "scale norm": {"use_scalenorm": True},
    "GLU and Swish": {"ff_glu": True, "ff_swish": True},
    "squared ReLU": {"ff_relu_squared": True},
    "qk norm": {"attn_qk_norm": True},
    "talking heads": {"attn_talking_heads": True},
    "sparse top-k": {"attn_sparse_topk": 4},
    "one kv head": {"attn_one_kv_head": True},
    "gated residual": {"gate_residual": True},
    "sandwich norm": {"sandwich_norm": True},
    "macaron": {"macaron": True},
}


@dataclass
class Made:
    """A model with its batches, and the loss of an output."""

    model: nn.Module
    batches: list[dict[str, Any]]
    loss: Callable[[Any, dict[str, Any]], Tensor]


@dataclass(frozen=True)
class Case:
    """A public model.

    Attributes:
        package: the package that defines the model.
        label: its name, unique.
        make: returns the model and its batches from the random state at the time of the call.
    """

    package: str
    label: str
    make: Callable[[], Made]


def cases() -> list[Case]:
    """Return the models, the packages in turns, so that the first ones are of all kinds."""
    columns = [list(each) for each in (*map(_of_transformers, HEADS), _graphs(), _vision(), _written(), _diffusion())]
    columns += [list(_of_timm()), list(_known())]
    longest = max(map(len, columns))
    found = [column[row] for row in range(longest) for column in columns if row < len(column)]
    return list({case.label: case for case in reversed(found)}.values())[::-1]  # a class may have several heads


# transformers ---------------------------------------------------------------------------------------------------------


def _of_transformers(kind: str) -> Iterator[Case]:
    table = importlib.import_module("transformers.models.auto.modeling_auto")
    seen = set()
    for model_type, names in getattr(table, HEADS[kind]).items():
        name = names[0] if isinstance(names, tuple) else names
        if name not in seen:
            seen.add(name)
            yield Case("transformers", name, partial(_transformer, name, kind, model_type))


def configuration(config: Any, model_type: str) -> Any:
    """Return a configuration of few and narrow layers and without dropout."""
    known = config().to_dict()
    aliases = config.attribute_map
    wanted = {**TINY, **HIERARCHIES.get(model_type, {})}
    options = {key: value for key, value in wanted.items() if key in known or key in aliases}
    options = {key: value for key, value in options.items() if aliases.get(key) not in options}
    options |= {key: 0.0 for key, value in known.items() if "drop" in key and isinstance(value, float)}
    made = config(**options, **({} if "num_labels" in options else {"num_labels": CLASSES}))
    if getattr(made, "decoder_start_token_id", None) is None:
        made.decoder_start_token_id = 0
    return made


def _transformer(name: str, kind: str, model_type: str) -> Made:
    model_class = getattr(importlib.import_module("transformers"), name)
    model = model_class(configuration(model_class.config_class, model_type))
    takes = inspect.signature(model.forward).parameters
    batches = []
    for _ in range(BATCHES):
        batch: dict[str, Any] = {"labels": torch.randint(CLASSES, (SIZE,))}
        if kind == "image":
            batch["pixel_values"] = torch.randn(SIZE, model.config.num_channels, SIDE, SIDE)
        elif kind == "audio":
            batch["input_values"] = torch.randn(SIZE, 400)
        else:
            ids = torch.randint(3, VOCABULARY, (SIZE, TOKENS))
            mask = torch.ones_like(ids)
            mask[0, TOKENS - 3 :] = 0
            batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        batches.append({key: value for key, value in batch.items() if key in takes})
    return Made(model, batches, lambda output, batch: output.loss)


def _known() -> Iterator[Case]:
    """Yield a T5 whose activations have the size of a trained one's: FP16 does not hold them."""
    yield Case("transformers", "T5ForConditionalGeneration, as large as trained", _large_t5)


def _large_t5() -> Made:
    made = _transformer("T5ForConditionalGeneration", "seq2seq", "t5")
    for name, weight in made.model.named_parameters():
        if name.endswith(".wo.weight"):
            weight.data.mul_(1e5)  # the feed-forwards' results: up to 2e5
    return made


# Others ---------------------------------------------------------------------------------------------------------------


def _classified(output: Tensor, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(output, batch["targets"])


def _pictures(model: nn.Module) -> Made:
    batches = [
        {"x": torch.randn(SIZE, 3, SIDE, SIDE), "targets": torch.randint(CLASSES, (SIZE,))} for _ in range(BATCHES)
    ]
    return Made(model, batches, _classified)


class _GraphNet(nn.Module):
    def __init__(self, convolution: Any, name: str) -> None:
        super().__init__()
        options = {"ChebConv": {"K": 2}, "EGConv": {"num_heads": 4}}.get(name, {})
        self.first, self.second = convolution(16, 32, **options), convolution(32, 32, **options)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.head(self.second(self.first(x, edge_index).relu(), edge_index).relu())


def _graph(name: str) -> Made:
    networks = importlib.import_module("torch_geometric.nn")
    if name in GRAPH_MODELS:
        model = getattr(networks, name)(16, 32, 2, CLASSES)
    else:
        model = _GraphNet(getattr(networks, name), name)
    nodes, batches = 40, []
    for _ in range(BATCHES):
        edges = torch.randint(nodes, (2, 160))
        batches.append({"x": torch.randn(nodes, 16), "edge_index": edges, "targets": torch.randint(CLASSES, (nodes,))})
    return Made(model, batches, _classified)


def _graphs() -> Iterator[Case]:
    for name in (*GRAPH_MODELS, *CONVOLUTIONS):
        yield Case("torch_geometric", name, partial(_graph, name))


def _torchvision_models() -> dict[str, Callable[[], nn.Module]]:
    tv = importlib.import_module("torchvision.models")
    block = importlib.import_module("torchvision.models.convnext").CNBlockConfig
    return {
        "VisionTransformer": lambda: tv.VisionTransformer(SIDE, 8, 2, 4, 32, 48, num_classes=CLASSES),
        "SwinTransformer": lambda: tv.SwinTransformer([4, 4], 8, [1, 1], [2, 2], [4, 4], num_classes=CLASSES),
        "ConvNeXt": lambda: tv.ConvNeXt([block(8, 16, 1), block(16, None, 1)], num_classes=CLASSES),
        "DenseNet": lambda: tv.DenseNet(4, (2, 2), 8, num_classes=CLASSES),
        "ShuffleNetV2": lambda: tv.ShuffleNetV2([1, 1, 1], [8, 8, 16, 16, 32], num_classes=CLASSES),
        "MobileNetV2": lambda: tv.MobileNetV2(
            CLASSES, 0.25, inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 1, 2], [6, 32, 1, 2]]
        ),
        "MNASNet": lambda: tv.MNASNet(0.1, num_classes=CLASSES, dropout=0.0),
    }


def _vision() -> Iterator[Case]:
    for name in VISION:
        yield Case("torchvision", name, partial(_torchvision, name))


def _torchvision(name: str) -> Made:
    return _pictures(_torchvision_models()[name]())


def _of_timm() -> Iterator[Case]:
    for name in TIMM:
        yield Case("timm", name, partial(_timm, name))


def _timm(name: str) -> Made:
    create = importlib.import_module("timm").create_model
    try:
        return _pictures(create(name, num_classes=CLASSES, img_size=SIDE))
    except TypeError:  # a convolutional model takes any size
        return _pictures(create(name, num_classes=CLASSES))


def _written() -> Iterator[Case]:
    for name in WRITTEN:
        yield Case("x_transformers", f"decoder, {name}", partial(_decoder, name))


def _next_token(output: Tensor, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["x"][:, 1:].flatten())


def _decoder(name: str) -> Made:
    library = importlib.import_module("x_transformers")
    layers = library.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **WRITTEN[name])
    model = library.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers)
    return Made(model, [{"x": torch.randint(VOCABULARY, (SIZE, TOKENS))} for _ in range(BATCHES)], _next_token)


def _denoised(output: Any, batch: dict[str, Any]) -> Tensor:
    return F.mse_loss(output.sample, batch["targets"])


def _diffusion() -> Iterator[Case]:
    for name in ("UNet2DModel", "UNet2DConditionModel", "AutoencoderKL", "DiTTransformer2DModel", "VQModel"):
        yield Case("diffusers", name, partial(_diffuser, name))
    for name in ("PixArtTransformer2DModel", "SD3Transformer2DModel", "PriorTransformer"):
        yield Case("diffusers", name, partial(_diffuser, name))


_STAGES = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
_GRID = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2}
DIFFUSERS = {
    "UNet2DModel": {
        **_STAGES,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 4,
    },
    "UNet2DConditionModel": {
        **_STAGES,
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 2,
    },
    "AutoencoderKL": {
        **_STAGES,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    },
    "VQModel": {
        **_STAGES,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "num_vq_embeddings": 16,
    },
    "DiTTransformer2DModel": {**_GRID, "in_channels": 3, "out_channels": 3, "num_embeds_ada_norm": 10},
    "PixArtTransformer2DModel": {
        **_GRID,
        "in_channels": 3,
        "out_channels": 3,
        "cross_attention_dim": 16,
        "caption_channels": 16,
        "use_additional_conditions": False,
    },
    "SD3Transformer2DModel": {
        **_GRID,
        "in_channels": 3,
        "out_channels": 3,
        "joint_attention_dim": 16,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 16,
    },
    "PriorTransformer": {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "embedding_dim": 8,
        "num_embeddings": 7,
        "additional_embeddings": 4,
    },
}


def _diffuser(name: str) -> Made:
    library = importlib.import_module("diffusers")
    model = getattr(library, name)(**DIFFUSERS[name])
    takes = inspect.signature(model.forward).parameters
    batches = [_noise(name, takes) for _ in range(BATCHES)]
    return Made(model, batches, _embedded if name == "PriorTransformer" else _denoised)


def _embedded(output: Any, batch: dict[str, Any]) -> Tensor:
    return F.mse_loss(output.predicted_image_embedding, batch["targets"])


def _noise(name: str, takes: Any) -> dict[str, Any]:
    image = torch.randn(SIZE, 3, 8, 8)
    steps = torch.rand(SIZE) * 1000 if name.startswith("SD3") else torch.randint(1000, (SIZE,))  # SD3: flow matching
    known = {
        "hidden_states": image,
        "sample": image,
        "timestep": steps,
        "encoder_hidden_states": torch.randn(SIZE, 7, 16),
        "pooled_projections": torch.randn(SIZE, 16),
        "class_labels": torch.randint(10, (SIZE,)),
    }
    if name == "PriorTransformer":
        flat = torch.randn(SIZE, 8)
        known |= {"hidden_states": flat, "proj_embedding": flat, "encoder_hidden_states": torch.randn(SIZE, 7, 8)}
        return {**{key: known[key] for key in known if key in takes}, "targets": torch.randn(SIZE, 8)}
    if name in ("UNet2DModel", "UNet2DConditionModel", "PixArtTransformer2DModel", "SD3Transformer2DModel"):
        known.pop("class_labels")
    target = image if name in ("AutoencoderKL", "VQModel") else torch.randn(SIZE, 3, 8, 8)
    return {**{key: known[key] for key in known if key in takes}, "targets": target}
