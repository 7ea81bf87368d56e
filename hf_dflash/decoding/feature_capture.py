# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What the drafter reads of the target: the outputs of a few decoder layers, taken in the pass that verifies.

This file is shipped beside a drafter's `custom_generate/generate.py`: it imports torch, transformers and its siblings only.
"""

import torch


class FeatureCapture:
    """
    A context manager that keeps the outputs of chosen decoder layers of each forward pass.

    Hooks, and not `output_hidden_states`, because that would keep every layer's output; id k is the output of decoder
    layer k before the final norm.

    Args:
        target (`PreTrainedModel`): the target.
        layer_ids (`list[int]`): `target_layer_ids` of the drafter's config.
        device (`torch.device`), dtype (`torch.dtype`): of the drafter. Layers of a target that is spread over several
            devices are brought together there.
    """

    def __init__(self, target, layer_ids: list[int], device: torch.device, dtype: torch.dtype):
        self.layers = [target.get_decoder().layers[i] for i in layer_ids]
        self.device, self.dtype = device, dtype
        self._outputs: list[torch.Tensor | None] = [None] * len(layer_ids)
        self._handles = []

    def __enter__(self):
        for slot, layer in enumerate(self.layers):
            self._handles.append(layer.register_forward_hook(self._make_hook(slot)))
        return self

    def __exit__(self, *exception):
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _make_hook(self, slot: int):
        def hook(module, arguments, output):
            self._outputs[slot] = output[0] if isinstance(output, tuple) else output

        return hook

    def take(self) -> torch.Tensor:
        """The features of the last pass, `[B, length, K * H]`, on the drafter's device and in its dtype."""
        features = torch.cat([output.to(self.device, self.dtype) for output in self._outputs], dim=-1)
        self._outputs = [None] * len(self._outputs)
        return features
