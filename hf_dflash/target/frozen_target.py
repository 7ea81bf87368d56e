# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The frozen target: token ids in, features and labels for the drafter out."""

import contextlib
import copy
import functools
import threading
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from transformers import masking_utils

from .compiled_layers import compile_decoder
from .fp8 import quantize_to_fp8
from .graphed_decoder import GraphedDecoder, is_on_one_cuda_device
from .hook_capture import HookCapture
from .language_head import LanguageHead


@dataclass
class TargetFeatures:
    """
    What the drafter gets of one micro-batch: documents behind one another without padding, T tokens in all.

    Args:
        context_hidden_states (`torch.Tensor` of shape `[T, K * H]`):
            Outputs of the K captured layers, side by side.
        label_ids (`torch.Tensor` of shape `[P]`, int64, *optional*):
            The target's own argmax at the P asked positions: its prediction of the token that follows.
        label_hidden_states (`torch.Tensor` of shape `[P, H]`, *optional*):
            Final normed hidden states there, for losses that need the target's distribution.
    """

    context_hidden_states: torch.Tensor
    label_ids: torch.Tensor | None = None
    label_hidden_states: torch.Tensor | None = None


# cuDNN's attention, PyTorch's first choice on Hopper, plans each new shape, which takes the host 50 ms on an H200, and the shapes of
# micro-batches differ. A small target's whole forward pass is shorter than that: flash attention starts at once. Behind the
# longer passes of a large one the host's work does not show, and cuDNN's kernels are faster (3% on sequences of 8,192 at 27B).
# PyTorch's switch is one for the whole process.
_CUDNN_PAYS_FROM = 2_000_000_000


def _in_its_own_precision(forward):
    """Autocast is the drafter's. It belongs to a thread, too: with it, features would depend on who asks for them."""

    @functools.wraps(forward)
    def without_autocast(self, *args, **kwargs):
        with torch.autocast(self.device.type, enabled=False):
            return forward(self, *args, **kwargs)

    return without_autocast


class FrozenTarget:
    """
    A target model that is only read. It is deliberately no `nn.Module`: nothing of it can end up in the drafter's module
    tree, checkpoint, optimizer or DDP.

    Args:
        model_or_name (`PreTrainedModel` or `str`):
            A causal language model, or what `AutoModelForCausalLM.from_pretrained` takes.
        layer_ids (`list[int]`):
            Layers to capture, see [`HookCapture`].
        device (`str` or `torch.device`, *optional*):
            Where the target runs; a model that is already loaded stays where it is by default.
        output_device (`str` or `torch.device`, *optional*):
            Where features go, the drafter's device; the target's own by default.
        output_dtype (`torch.dtype`, *optional*):
            Of the features; the target's own by default.
        dtype (`str` or `torch.dtype`, *optional*, defaults to `"auto"`):
            Of the weights, if the target is loaded here.
        load_kwargs:
            Further arguments of `from_pretrained`.

    Raises:
        `ValueError`: if a layer id is unusable or the model has no language head.
    """

    def __init__(
        self,
        model_or_name,
        layer_ids: list[int],
        *,
        device=None,
        output_device=None,
        output_dtype: torch.dtype | None = None,
        dtype="auto",
        **load_kwargs,
    ):
        if isinstance(model_or_name, str):
            from transformers import AutoModelForCausalLM

            # Straight to its device: a 27B target would not fit twice into the host's memory.
            if device is not None and "device_map" not in load_kwargs:
                load_kwargs["device_map"] = {"": device}
            model = AutoModelForCausalLM.from_pretrained(model_or_name, dtype=dtype, **load_kwargs)
        else:
            model = model_or_name if device is None else model_or_name.to(device)
        self.model = model.eval().requires_grad_(False)
        self.decoder = model.get_decoder()
        self.layer_ids = list(layer_ids)
        self._capture = HookCapture(model, self.layer_ids)
        self._graphed: GraphedDecoder | None = None
        self._own_head = LanguageHead.from_model(model)
        self._own_embedding = model.get_input_embeddings()
        self.device = self._own_embedding.weight.device
        if self.device.type == "cuda" and model.num_parameters() < _CUDNN_PAYS_FROM:
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.serve(output_device or self.device, output_dtype or self._own_head.weight.dtype)

    def serve(self, device, dtype: torch.dtype) -> "FrozenTarget":
        """Sends features to `device` in `dtype` from now on, and copies embedding and head there (once, if need be)."""
        self.output_device, self.output_dtype = torch.device(device), dtype
        self.head = self._own_head.to(self.output_device)
        same_device = self.output_device == self.device
        embedding = self._own_embedding if same_device else copy.deepcopy(self._own_embedding).to(self.output_device)
        if getattr(embedding, "embed_norm", None) is not None:
            # A view of the same weights: the target itself, perhaps at work in another thread, keeps its norm.
            embedding = copy.copy(embedding)
            embedding._modules = {**embedding._modules, "embed_norm": nn.Identity()}
        self.embedding = embedding
        return self

    def compile_layers(self, dynamic: bool = True, backend: str = "inductor") -> "FrozenTarget":
        """Compiles norms, MLPs and chains of element-wise operations layer by layer, see [`compile_decoder`]. Decoding with
        this model goes on uncompiled.

        Args:
            dynamic (`bool`, *optional*, defaults to `True`): one code for all lengths.
            backend (`str`, *optional*, defaults to `"inductor"`): of `torch.compile`.
        """
        compile_decoder(self.decoder, dynamic=dynamic, backend=backend)
        return self

    def quantize_to_fp8(self) -> "FrozenTarget":
        """Puts the layers' large matrices into FP8, see [`quantize_to_fp8`]. The model itself is changed."""
        quantize_to_fp8(self.decoder)
        return self

    def record_graphs(self) -> "FrozenTarget":
        """Runs the decoder from CUDA graphs from now on, see [`GraphedDecoder`]. Decoding with this model goes on as before.

        What changes the model, FP8 say, comes first: graphs read the weights where they were when they were recorded.

        Raises:
            `ValueError`: if the target is not on one CUDA device.
        """
        if not is_on_one_cuda_device(self.model):
            raise ValueError(
                "CUDA graphs take a target that is on one CUDA device: leave `--target_cuda_graphs on` out."
            )
        self._graphed = GraphedDecoder(self._run_decoder, self.device)
        return self

    @property
    def config(self):
        """The target's configuration (its text part)."""
        return self.model.config.get_text_config(decoder=True)

    @torch.no_grad()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of the slots, on the drafter's device and in its dtype.

        A norm that some embeddings apply (`embed_norm`) is passed over, as transformers' own DFlash decoding does.

        Args:
            token_ids (`torch.Tensor` of any shape, int64): on the drafter's device.

        Returns:
            `torch.Tensor` of shape `[..., H]`.
        """
        return self.embedding(token_ids).to(self.output_dtype)

    @torch.no_grad()
    @_in_its_own_precision
    def __call__(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor,
        label_positions: torch.Tensor | None = None,
        *,
        return_label_hidden_states: bool = False,
        device: torch.device | None = None,
    ) -> TargetFeatures:
        """Runs the target over a right-padded batch.

        Right padding without an attention mask is exact for dense and for hybrid models: causal attention never
        looks right, and recurrent states only flow to the right. Packing would leak through gated-delta-net layers.

        Args:
            input_ids (`torch.Tensor` of shape `[R, L]`, int64): token ids; what stands in the padding does not matter.
            lengths (`torch.Tensor` of shape `[R]`, int64): real tokens of each row.
            label_positions (`torch.Tensor` of shape `[P]`, int64, *optional*): packed positions (rows behind one another
                without padding) whose next token the target shall predict.
            return_label_hidden_states (`bool`, *optional*, defaults to `False`): also return the hidden states there.
            device (`torch.device`, *optional*): where the features go; the drafter's device by default.

        Returns:
            [`TargetFeatures`] on that device.
        """
        device = self.output_device if device is None else device
        if self._graphed is not None and input_ids.numel():
            input_ids = self._graphed.pad(input_ids)
        real = torch.arange(input_ids.shape[1], device=lengths.device)[None] < lengths[:, None]
        packed = upload(real.flatten().nonzero().squeeze(1), self.device)
        if packed.numel() == 0:
            return self._nothing(label_positions is not None, return_label_hidden_states, device)

        # Without labels nothing behind the last captured layer is needed.
        run = self._run_decoder if self._graphed is None else self._graphed
        states = run(upload(input_ids, self.device), label_positions is not None)
        layers = states[: len(self.layer_ids)]
        # A target sharded over several devices hands out its layers on several devices.
        context = torch.cat(
            [self._send(layer.flatten(0, 1)[packed.to(layer.device)], device) for layer in layers], dim=-1
        )
        if label_positions is None:
            return TargetFeatures(context)

        final = states[-1].flatten(0, 1)
        final = final[packed.to(final.device)[upload(label_positions, final.device)]]
        label_ids = self._own_head.predict(final.to(self._own_head.weight.device)).to(device)
        return TargetFeatures(context, label_ids, self._send(final, device) if return_label_hidden_states else None)

    def _run_decoder(self, input_ids: torch.Tensor, to_the_end: bool) -> list[torch.Tensor]:
        """Outputs of the captured layers, and the final normed hidden states if asked for; `[R, L, H]` each."""
        with self._capture.stop_early(not to_the_end), _current_device(self.device), _rows_are_documents():
            output = self.decoder(input_ids=input_ids, attention_mask=None, use_cache=False)
        layers = self._capture.features
        self._capture.clear()
        return [*layers, output.last_hidden_state] if to_the_end else layers

    def _send(self, states: torch.Tensor, device: torch.device) -> torch.Tensor:
        return states.to(device, self.output_dtype)

    def _nothing(self, with_labels: bool, with_hidden_states: bool, device: torch.device) -> TargetFeatures:
        """The features of a batch without rows, which fills the tail of an epoch."""
        hidden_size = self.config.hidden_size
        where = {"device": device, "dtype": self.output_dtype}
        return TargetFeatures(
            torch.zeros(0, len(self.layer_ids) * hidden_size, **where),
            torch.zeros(0, dtype=torch.long, device=device) if with_labels else None,
            torch.zeros(0, hidden_size, **where) if with_labels and with_hidden_states else None,
        )


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Brings a tensor of the host to a device; from pinned memory, so that the host does not wait for the device."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _current_device(device: torch.device):
    """Triton kernels are launched on the current device, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class _ThisThread(threading.local):
    rows_are_documents = False


_this_thread = _ThisThread()


@contextlib.contextmanager
def _rows_are_documents():
    """Without a mask, transformers looks for packed documents among the positions, and the host waits for the answer. And while a
    CUDA graph is recorded, some of its releases write out the causal mask, for which attention has slower kernels only."""
    _ask_this_thread_first()
    _this_thread.rows_are_documents = True
    try:
        yield
    finally:
        _this_thread.rows_are_documents = False


@lru_cache(maxsize=1)
def _ask_this_thread_first() -> None:
    look = getattr(masking_utils, "find_packed_sequence_indices", None)
    if look is not None:
        masking_utils.find_packed_sequence_indices = lambda position_ids: (
            None if _this_thread.rows_are_documents else look(position_ids)
        )
    is_tracing = getattr(masking_utils, "is_tracing", None)
    if is_tracing is not None:
        masking_utils.is_tracing = lambda tensor=None: not _this_thread.rows_are_documents and is_tracing(tensor)
