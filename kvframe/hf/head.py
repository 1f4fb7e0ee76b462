"""The logits that a model makes of its decoder's states. The model's own code makes them, whatever it does before and
after its head: scaling, capping, adding a bias, leaving out columns that pad the vocabulary."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvframe.errors import ModelError
from kvframe.hf.finding import decoder_of
from kvframe.hf.probe import unwrapped

HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def logits_of(model: PreTrainedModel, output: Any, states: Tensor, tokens: Tensor) -> Tensor:
    """The logits fp32 `[B, T, vocabulary]` that follow the decoder's final hidden `states [B, T, hidden]` of `tokens
    [B, T]`. `output` is something that the decoder gave back.

    Raises ModelError for a model that cannot be called so."""
    shell = _with_decoder_giving(model, type(output)(last_hidden_state=states))
    try:
        # Not a call: whoever listens to the model is not to hear of this.
        logits: Tensor = shell.forward(input_ids=tokens, use_cache=False, return_dict=True).logits
    # What a model's code raises may be anything.
    except Exception as error:
        raise ModelError(
            f"The surprisal of tokens cannot be observed with {type(model).__name__}, since its logits do not follow "
            f"from its decoder's states ({type(error).__name__}: {error}); use stages that do without."
        ) from error
    if logits.shape[:2] != tokens.shape:
        raise ModelError(
            f"The surprisal of tokens cannot be observed with {type(model).__name__}, which gives logits "
            f"{list(logits.shape)} for tokens {list(tokens.shape)}; use stages that do without."
        )
    return logits.float()


def decoder_path(model: PreTrainedModel) -> list[str]:
    """The names that lead from a model to its decoder. Raises ModelError for a decoder that has nothing around it."""
    decoder = decoder_of(model)
    path = next((name for name, module in unwrapped(model).named_modules() if module is decoder), "")
    if not path:
        raise ModelError(
            f"{type(model).__name__} has no head that gives logits, but a stage needs the surprisal of tokens; use the "
            "model class with one (…ForCausalLM), or another stage."
        )
    return path.split(".")


def _with_decoder_giving(model: PreTrainedModel, output: Any) -> Any:
    """A model that shares all with `model` but its decoder, which does nothing and gives `output`. `model` is not
    touched, so that it can be called at the same time."""
    shell = inner = _apart(unwrapped(model))
    for name in decoder_path(model):
        inner._modules[name] = inner = _apart(inner._modules[name])
    inner.forward = lambda *args, **kwargs: output
    return shell


def _apart(module: Any) -> Any:
    """A shallow copy of a module, with children of its own, to which nobody listens. What was put in place of its
    `forward` is bound to the module itself, and left out."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    for name in HOOKS:
        setattr(other, name, OrderedDict())
    other.__dict__.pop("forward", None)
    return other
