# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Forward hooks that keep the outputs of chosen decoder layers."""

import torch

from ..drafter.configuration_dflash import check_target_layer_ids


class _AllCaptured(Exception):
    """Ends a forward pass that has nothing more to give; never seen outside."""


class HookCapture:
    """
    Keeps the outputs of some decoder layers of each forward pass; `output_hidden_states` would keep all of them.

    Args:
        model (`PreTrainedModel`): any causal language model, multimodal ones too.
        layer_ids (`list[int]`): strictly increasing; id k is the output of decoder layer k before the final norm.

    Raises:
        `ValueError`: if an id is unusable (see [`check_target_layer_ids`]), or the model has no list of decoder layers.

    Example:

    ```python
    with HookCapture(target, [1, 3]) as capture:
        target(input_ids)
    first, second = capture.features
    ```
    """

    def __init__(self, model, layer_ids: list[int]):
        self._decoder = model.get_decoder()
        layers = getattr(self._decoder, "layers", None)
        if layers is None:
            raise ValueError(f"{type(model).__name__} has no `get_decoder().layers` to take features from.")
        check_target_layer_ids(layer_ids, len(layers))
        self._layers = [layers[layer_id] for layer_id in layer_ids]
        self._captured: list[torch.Tensor | None] = [None] * len(layer_ids)
        self._handles = []
        self._stops_early = False

    def stop_early(self, stops: bool = True) -> "HookCapture":
        """Whether the next passes end behind the last layer that is captured: what stands behind the call is not run."""
        self._stops_early = stops
        return self

    def __enter__(self) -> "HookCapture":
        # A pass that is stopped half-way must not leave layers of two passes side by side.
        self._handles.append(self._decoder.register_forward_pre_hook(lambda module, args: self.clear()))
        for index, layer in enumerate(self._layers):
            self._handles.append(layer.register_forward_hook(self._keep(index)))
        return self

    def _keep(self, index: int):
        def hook(module, args, output):
            self._captured[index] = output[0] if isinstance(output, tuple) else output
            if self._stops_early and index == len(self._layers) - 1:
                raise _AllCaptured

        return hook

    @property
    def features(self) -> list[torch.Tensor]:
        """The captured tensors `[B, L, H]` of the last forward pass, in the order of `layer_ids`.

        Raises:
            `RuntimeError`: if no forward pass ran, or one was stopped before it reached every layer.
        """
        if any(feature is None for feature in self._captured):
            raise RuntimeError("No features yet: run the model inside `with HookCapture(...)` first.")
        return list(self._captured)

    def clear(self) -> None:
        """Lets go of the captured tensors."""
        self._captured = [None] * len(self._layers)

    def __exit__(self, error_type, *exc_info) -> bool:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return error_type is _AllCaptured
