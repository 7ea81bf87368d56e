# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""`target.generate(..., custom_generate="<this drafter>", trust_remote_code=True, assistant_model=drafter)`.

A saved drafter carries this file in its `custom_generate` folder with the rest of the decoding code beside it. It needs
torch and transformers, no other package.
"""

from .speculative import speculative_generate


def generate(model, inputs=None, assistant_model=None, **kwargs):
    """
    What transformers calls with every argument of `generate`.

    Args:
        model (`PreTrainedModel`): the target.
        inputs (`torch.LongTensor` of shape `[B, length]`, *optional*): prompts; `input_ids` is the same.
        assistant_model ([`DFlashForSpeculation`]): the drafter. transformers does not say which repository this function
            comes from, so it has to be given.
        kwargs: of `generate`, and `generator`, `sample_drafts`, `adaptive_block`, `tree_budget`, `cuda_graph` of
            `speculative_generate`.

    Returns:
        What `generate` returns: ids of shape `[B, length]`, or with `return_dict_in_generate` an output that also holds the
        acceptance lengths.

    Raises:
        `ValueError`: without a drafter or a prompt.
    """
    if assistant_model is None:
        raise ValueError(
            "Pass the drafter too: generate(..., assistant_model=AutoModel.from_pretrained(<drafter>, trust_remote_code=True))."
        )
    arguments = {name: value for name, value in kwargs.items() if value is not None}
    input_ids = arguments.pop("input_ids", inputs)
    if input_ids is None:
        raise ValueError("DFlash decodes token ids: pass `input_ids`.")
    # `generate` would take it as a sign to use its own DFlash path.
    arguments.pop("speculation_type", None)
    config = arguments.get("generation_config", model.generation_config)
    return speculative_generate(
        model,
        assistant_model,
        input_ids,
        do_sample=arguments.pop("do_sample", None),
        return_stats=bool(arguments.get("return_dict_in_generate", config.return_dict_in_generate)),
        **arguments,
    )
