# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The drafter's configuration, and how one is made from a target's.

This file is shipped to the Hub beside the weights: it imports torch, transformers and its siblings only.
"""

from difflib import get_close_matches
from typing import Any

from transformers import PretrainedConfig


# Published drafters for targets with wide heads (Qwen3.5, Qwen3.6) all use plain Qwen3 heads of this geometry.
_MAX_HEAD_DIM = 128
_MAX_ATTENTION_HEADS = 32
_ATTENTION_HEADS_PER_KEY_VALUE_HEAD = 4


class DFlashConfig(PretrainedConfig):
    r"""
    Configuration of a DFlash drafter (arXiv 2602.06036): a few Qwen3-style layers whose queries are the slots of a block
    and whose keys and values are target features plus the block itself.

    Args:
        vocab_size (`int`, *optional*, defaults to 151936):
            Rows of the target's embedding and head. The drafter has neither, it borrows both.
        hidden_size (`int`, *optional*, defaults to 4096):
            Width of the drafter; always the target's.
        intermediate_size (`int`, *optional*, defaults to 12288):
            Width of the MLP.
        num_hidden_layers (`int`, *optional*, defaults to 5):
            Depth (the paper's 5).
        num_attention_heads (`int`, *optional*, defaults to 32):
            Query heads.
        num_key_value_heads (`int`, *optional*, defaults to 8):
            Key and value heads.
        head_dim (`int`, *optional*, defaults to 128):
            Width of a head. Rotary embeddings always cover all of it.
        hidden_act (`str`, *optional*, defaults to `"silu"`):
            Activation of the MLP.
        max_position_embeddings (`int`, *optional*, defaults to 40960):
            Longest context, the target's.
        initializer_range (`float`, *optional*, defaults to 0.02):
            Standard deviation of the initial matrices.
        rms_norm_eps (`float`, *optional*, defaults to 1e-6):
            Epsilon of every norm.
        attention_bias (`bool`, *optional*, defaults to `False`):
            Whether the attention projections have a bias. No engine reads one.
        rope_parameters (`dict`, *optional*):
            `{"rope_type": "default", "rope_theta": float}`. Only the default type exists here: partial and multimodal
            rotary embeddings of a target must not be inherited (speculators issues 613 and 738).
        layer_types (`list[str]`, *optional*):
            `"full_attention"` or `"sliding_attention"` for each layer; all full by default.
        sliding_window (`int`, *optional*):
            W: a key is visible in a sliding layer iff |position difference| < W.
        is_causal (`bool`, *optional*, defaults to `False`):
            About the slots of one block: `False` is bidirectional in every layer, `None` causal in sliding layers only
            (what published z-lab and SpecForge checkpoints mean), `True` causal everywhere.
        block_size (`int`, *optional*, defaults to 16):
            B: one anchor slot and B - 1 drafts.
        mask_token_id (`int`, *optional*):
            Row of the target's embedding that fills the slots to predict.
        target_layer_ids (`list[int]`, *optional*):
            Strictly increasing; id k is the output of the target's decoder layer k before its final norm
            (`hidden_states[k + 1]`), 0 <= k <= `num_target_layers` - 2.
        num_target_layers (`int`, *optional*):
            Decoder layers of the target.
        target_name_or_path (`str`, *optional*):
            The target that this drafter was trained for.

    Raises:
        `ValueError`: for every value above that would train or serve wrongly, naming it and the fix.

    Example:

    ```python
    >>> from hf_dflash import DFlashConfig, DFlashForSpeculation

    >>> config = DFlashConfig(hidden_size=64, target_layer_ids=[1, 3], num_target_layers=8, mask_token_id=7)
    >>> drafter = DFlashForSpeculation(config)
    ```
    """

    model_type = "dflash"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    rope_parameters: dict | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    is_causal: bool | None = False
    block_size: int = 16
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    target_name_or_path: str | None = None

    def __post_init__(self, **kwargs):
        if self.rope_parameters is None:
            # Configs of earlier releases of transformers state `rope_theta` by itself.
            self.rope_parameters = {"rope_type": "default", "rope_theta": kwargs.pop("rope_theta", 10000.0)}
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.num_target_layers is not None and self.target_layer_ids is None:
            self.target_layer_ids = select_target_layer_ids(self.num_target_layers)
        self._check_values()
        self._check_rope_parameters()
        super().__post_init__(**kwargs)
        # Once more, for that call merges rotary options of earlier releases (`rope_scaling`, `partial_rotary_factor`).
        self._check_rope_parameters()

    def _check_values(self):
        if self.block_size < 2:
            raise ValueError(
                f"`block_size` is {self.block_size}: a block is an anchor and at least one draft, so 2 or more."
            )
        for name in (
            "num_hidden_layers",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        ):
            if (getattr(self, name) or 0) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}: it must be at least 1.")
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` is {self.head_dim}: a rotary embedding turns pairs, so it must be even.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})."
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_types` names {len(self.layer_types)} layers, `num_hidden_layers` is {self.num_hidden_layers}: "
                "they must agree."
            )
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(
                f"`layer_types` holds {sorted(unknown)}: a drafter layer is 'full_attention' or 'sliding_attention'."
            )
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError(
                "`layer_types` has 'sliding_attention', so `sliding_window` must be a positive number of keys."
            )
        if "sliding_attention" in self.layer_types and self.sliding_window < self.block_size:
            raise ValueError(
                f"`sliding_window` ({self.sliding_window}) is shorter than a block ({self.block_size} slots): the last "
                "slots would not see their anchor. Use a window of at least `block_size`."
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` {self.mask_token_id} is outside the vocabulary (0 to {self.vocab_size - 1}): "
                "choose an unused row of the target's embedding."
            )
        if self.target_layer_ids is not None:
            check_target_layer_ids(self.target_layer_ids, self.num_target_layers)

    def _check_rope_parameters(self):
        rope_type = self.rope_parameters.get("rope_type", "default")
        foreign = {"partial_rotary_factor", "mrope_section", "mrope_interleaved"} & set(self.rope_parameters)
        if rope_type != "default" or foreign or "rope_theta" not in self.rope_parameters:
            raise ValueError(
                f"`rope_parameters` is {self.rope_parameters}: a drafter has its own plain rotary embedding, "
                "{'rope_type': 'default', 'rope_theta': <float>}, whatever its target uses."
            )


def check_target_layer_ids(target_layer_ids: list[int], num_target_layers: int | None) -> None:
    """Refuses layer ids that an engine would read differently or not at all.

    Raises:
        `ValueError`: if the ids are empty, repeated, not increasing, negative, or reach the target's last layer.
    """
    ids = list(target_layer_ids)
    if not ids or any(later <= earlier for earlier, later in zip(ids, ids[1:], strict=False)):
        raise ValueError(
            f"`target_layer_ids` is {ids}: give at least one id, strictly increasing and without repetition; "
            "engines concatenate features in layer order."
        )
    if ids[0] < 0:
        raise ValueError(
            f"`target_layer_ids` is {ids}: ids count from 0, negative ones are not understood by engines."
        )
    if num_target_layers is not None and ids[-1] > num_target_layers - 2:
        raise ValueError(
            f"`target_layer_ids` is {ids}, but the highest usable id of a target with {num_target_layers} layers is "
            f"{num_target_layers - 2}: the last layer's output is normed in some engines, raw in others and refused in SGLang."
        )


def select_target_layer_ids(num_target_layers: int, num_target_features: int = 5) -> list[int]:
    """The layers whose outputs the drafter reads: evenly spaced from 1 to L - 3, whatever the drafter's depth.

    Args:
        num_target_layers (`int`): L, the target's decoder layers.
        num_target_features (`int`, *optional*, defaults to 5): how many, fewer when the target has too few layers.

    Returns:
        `list[int]`: strictly increasing ids; a single one is L // 2.
    """
    if num_target_layers < 2:
        raise ValueError(
            f"A target of {num_target_layers} layer(s) has no layer before its last one to take features from."
        )
    if num_target_features < 1:
        raise ValueError(f"`num_target_features` is {num_target_features}: a drafter reads one layer at least.")
    first, last = 1, num_target_layers - 3
    count = min(num_target_features, last - first + 1)
    if count <= 1:
        return [min(num_target_layers // 2, num_target_layers - 2)]
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def find_mask_token_id(tokenizer, vocab_size: int, pad_token_id: int | None = None) -> int:
    """Finds an embedding row that text never uses, to stand for "to be predicted".

    In this order: the tokenizer's own mask token; an added token whose name says that it is reserved or unused; the first
    row of the embedding beyond the tokenizer.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the target's.
        vocab_size (`int`): rows of the target's embedding.
        pad_token_id (`int`, *optional*): never chosen, nor any end, begin or unknown token.

    Raises:
        `ValueError`: if no such row exists.
    """
    taken = {
        pad_token_id,
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
        tokenizer.unk_token_id,
    }
    mask_token_id = getattr(tokenizer, "mask_token_id", None)
    if mask_token_id is not None and mask_token_id not in taken and mask_token_id < vocab_size:
        return mask_token_id
    for token_id, token in sorted(tokenizer.added_tokens_decoder.items()):
        name = str(token).lower()
        if (
            ("reserved" in name or "unused" in name or "mask" in name)
            and token_id not in taken
            and token_id < vocab_size
        ):
            return token_id
    # `len(tokenizer)` counts tokens, which is not the highest id where the vocabulary has holes.
    for token_id in range(max(tokenizer.get_vocab().values()) + 1, vocab_size):
        if token_id not in taken:
            return token_id
    raise ValueError(
        f"The tokenizer fills all {vocab_size} rows of the embedding and names none as reserved or unused: pass "
        "`mask_token_id`, the id of a token that your completions never contain."
    )


def create_drafter_config(
    target_config: PretrainedConfig,
    *,
    num_hidden_layers: int = 5,
    block_size: int = 16,
    mask_token_id: int | None = None,
    tokenizer=None,
    target_layer_ids: list[int] | None = None,
    num_target_features: int = 5,
    sliding_window: int | None = None,
    layer_types: list[str] | None = None,
    is_causal: bool | None = False,
    **overrides: Any,
) -> DFlashConfig:
    """Makes a drafter's configuration for a target (Llama, Qwen2, Qwen3, Qwen3.5/3.6, plain or multimodal).

    Hidden size and vocabulary are the target's. Heads are too, unless they are wider than 128, which no published drafter
    copies. Partial rotary, mrope and rope scaling are never inherited; `rope_theta` is.

    Args:
        target_config (`PretrainedConfig`): the target's, plain or nested (its text part is used).
        num_hidden_layers (`int`, *optional*, defaults to 5): drafter layers.
        block_size (`int`, *optional*, defaults to 16): slots of a block, anchor included.
        mask_token_id (`int`, *optional*): found with `tokenizer` when not given.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the target's, to find a mask token.
        target_layer_ids (`list[int]`, *optional*): chosen by [`select_target_layer_ids`] when not given.
        num_target_features (`int`, *optional*, defaults to 5): how many layers to choose.
        sliding_window (`int`, *optional*): makes every layer a sliding one unless `layer_types` says otherwise.
        layer_types (`list[str]`, *optional*): the kind of each layer.
        is_causal (`bool`, *optional*, defaults to `False`): see [`DFlashConfig`].
        overrides: any other field of [`DFlashConfig`].

    Raises:
        `ValueError`: if the mask token is out of range, the pad token or cannot be found; if a layer id is unusable; if
            the target states no `rope_theta`; if an override is no field.
    """
    _check_fields(overrides)
    text_config = target_config.get_text_config(decoder=True)
    pad_token_ids = {text_config.pad_token_id, getattr(target_config, "pad_token_id", None)} - {None}
    if tokenizer is not None:
        pad_token_ids |= {tokenizer.pad_token_id} - {None}

    if mask_token_id is None:
        if tokenizer is None:
            raise ValueError("Pass `mask_token_id`, or the target's `tokenizer` to find an unused token.")
        mask_token_id = find_mask_token_id(tokenizer, text_config.vocab_size, text_config.pad_token_id)
    if mask_token_id in pad_token_ids:
        raise ValueError(
            f"`mask_token_id` {mask_token_id} is the pad token, whose embedding is often zero or shared with the end of "
            "turn: choose another unused row."
        )

    if layer_types is None and sliding_window is not None:
        layer_types = ["sliding_attention"] * num_hidden_layers

    values = {
        "vocab_size": text_config.vocab_size,
        "hidden_size": text_config.hidden_size,
        "intermediate_size": _intermediate_size(text_config),
        **_head_geometry(text_config),
        "max_position_embeddings": text_config.max_position_embeddings,
        "rms_norm_eps": getattr(text_config, "rms_norm_eps", None) or 1e-6,
        "pad_token_id": text_config.pad_token_id,
        "eos_token_id": text_config.eos_token_id,
        "bos_token_id": text_config.bos_token_id,
        "target_name_or_path": getattr(target_config, "_name_or_path", None) or None,
        **overrides,
    }
    if "rope_parameters" not in overrides:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": _rope_theta(text_config)}
    for name in ("hidden_size", "vocab_size"):
        if values[name] != getattr(text_config, name):
            raise ValueError(
                f"`{name}` is {values[name]}, the target's is {getattr(text_config, name)}: the drafter borrows the target's "
                "embedding and head, so they must be equal."
            )
    num_target_layers = text_config.num_hidden_layers
    return DFlashConfig(
        num_hidden_layers=num_hidden_layers,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=select_target_layer_ids(num_target_layers, num_target_features)
        if target_layer_ids is None
        else list(target_layer_ids),
        num_target_layers=num_target_layers,
        sliding_window=sliding_window,
        layer_types=layer_types,
        is_causal=is_causal,
        **values,
    )


def _check_fields(names) -> None:
    """A config keeps any name it is given: a misspelt one would change nothing."""
    known = {*vars(DFlashConfig()), "pad_token_id", "eos_token_id", "bos_token_id", "attn_implementation"}
    # Of earlier releases; the config answers them itself.
    known |= {"rope_theta", "rope_scaling", "partial_rotary_factor"}
    for name in names:
        if name not in known:
            close = ", ".join(get_close_matches(name, known)) or "see `DFlashConfig`"
            raise ValueError(f"`{name}` is no field of a drafter's configuration: {close}.")


def _intermediate_size(text_config) -> int:
    """The target's dense MLP width; three hidden sizes for a mixture of experts, which has none of its own."""
    if getattr(text_config, "num_experts", None) or getattr(text_config, "num_local_experts", None):
        return 3 * text_config.hidden_size
    return text_config.intermediate_size


def _head_geometry(text_config) -> dict[str, int]:
    heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    if head_dim <= _MAX_HEAD_DIM:
        key_value_heads = getattr(text_config, "num_key_value_heads", None) or heads
        return {"num_attention_heads": heads, "num_key_value_heads": key_value_heads, "head_dim": head_dim}
    heads = max(1, min(_MAX_ATTENTION_HEADS, text_config.hidden_size // _MAX_HEAD_DIM))
    # A multiple of the group size, so that the key and value heads come out whole.
    heads -= heads % _ATTENTION_HEADS_PER_KEY_VALUE_HEAD if heads >= _ATTENTION_HEADS_PER_KEY_VALUE_HEAD else 0
    key_value_heads = max(1, heads // _ATTENTION_HEADS_PER_KEY_VALUE_HEAD)
    return {"num_attention_heads": heads, "num_key_value_heads": key_value_heads, "head_dim": _MAX_HEAD_DIM}


def _rope_theta(text_config) -> float:
    rope = getattr(text_config, "rope_parameters", None) or {}
    # Targets with one rotary embedding per layer type (Gemma 3) nest them; the full-attention one is the long-range one.
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta", getattr(text_config, "rope_theta", None))
    if theta is None:
        raise ValueError(
            f"The target's config ({type(text_config).__name__}) states no `rope_theta`: pass "
            "`rope_parameters={'rope_type': 'default', 'rope_theta': ...}`."
        )
    return float(theta)


DFlashConfig.register_for_auto_class()
