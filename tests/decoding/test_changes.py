"""What is done to a model after it was wrapped: followed, or refused in a sentence."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from transformers import OPTConfig, OPTForCausalLM

from deepenough import UserError
from deepenough.decoding import native_backend
from deepenough.decoding.api import early_exit, speculate
from deepenough.decoding.calibration import calibrate
from deepenough.decoding.early_exit import FixedLayer, TopProbability

GREEDY = {"do_sample": False, "max_new_tokens": 16}
IDS = torch.arange(3, 10)[None]


class LowRank(nn.Module):
    """What PEFT puts in the place of a linear map (PEFT itself is not needed to test it)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Parameter(torch.randn(4, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 4))

    def forward(self, hidden):
        return self.base_layer(hidden) + hidden @ self.down.t() @ self.up.t()


class Negated(nn.Module):
    def forward(self, weight):
        return -weight


def attach_adapter(model) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_proj = LowRank(attention.q_proj)


def hook_layer(model) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, output: -output)


def hook_inside(model) -> None:
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: (-args[0],))


def hook_norm(model) -> None:
    model.model.norm.register_forward_hook(lambda module, args, output: output.roll(1, -1))


def hook_head(model) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: -output)


def hook_trunk(model) -> None:
    model.model.register_forward_hook(lambda module, args, output: output)


def hook_model(model) -> None:
    model.register_forward_hook(lambda module, args, output: output)


def load_weights(model) -> None:
    model.load_state_dict({name: value.roll(1, 0) for name, value in model.state_dict().items()})


def edit_in_place(model) -> None:
    model.model.layers[2].mlp.down_proj.weight.mul_(-2)


def edit_one_number(model) -> None:
    model.model.layers[2].mlp.down_proj.weight[3, 5] = 90.0


def take_optimiser_step(model) -> None:
    model.requires_grad_(True)
    model(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), 1.0).step()


def replace_layer(model) -> None:
    other = copy.deepcopy(model.model.layers[2])
    other.self_attn.layer_idx = 1
    model.model.layers[1] = other


def replace_parameter(model) -> None:
    model.model.layers[2].mlp.down_proj.weight = nn.Parameter(torch.randn(32, 48))


class EightBits(nn.Module):
    """A linear map with rounded weights, as quantisation of weights alone leaves it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.scale = base.weight.abs().max() / 8
        self.register_buffer("weight", (base.weight / self.scale).round().to(torch.int8))

    def forward(self, hidden):
        return hidden @ (self.weight.to(hidden.dtype) * self.scale).t()


def quantise(model) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj = EightBits(layer.mlp.up_proj)


def quantise_activations(model) -> None:
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)


def prune_weights(model) -> None:
    prune.random_unstructured(model.model.layers[1].mlp.up_proj, "weight", 0.5)


def parametrise(model) -> None:
    parametrize.register_parametrization(model.model.layers[1].mlp.up_proj, "weight", Negated())


def replace_forward(model) -> None:
    layer = model.model.layers[1]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: -own(*args, **kwargs)


def compile_forward(model) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def change_epsilon(model) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 3.0


def change_scaling(model) -> None:
    model.model.layers[1].self_attn.scaling = 3.0


def change_type(model) -> None:
    model.double()


def train(model) -> None:
    model.train()


def train_layers(model) -> None:
    model.model.train()


def write_data(model) -> None:
    model.model.layers[2].mlp.down_proj.weight.data = torch.randn(32, 48)


FOLLOWED: list[Callable[..., None]] = [
    *(attach_adapter, hook_layer, hook_inside, hook_norm, hook_head, load_weights, edit_in_place),
    *(edit_one_number, take_optimiser_step, replace_layer, replace_parameter, quantise),
    *(prune_weights, parametrise, replace_forward, change_epsilon, change_scaling, change_type),
    *(write_data, quantise_activations),
]
REFUSED: dict[Callable[..., None], str] = {
    hook_trunk: "a hook around all of its layers",
    hook_model: "a hook around all of its layers",
    compile_forward: "another forward",
    train: "training mode",
    train_layers: "training mode",
}


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("backend", [None, "torch", "general"])
@pytest.mark.parametrize("change", FOLLOWED)
def test_changed_model_is_the_one_that_answers(make_model, change, backend, monkeypatch) -> None:
    if backend == "torch":  # the fastest where there is no compiled code
        monkeypatch.setattr(native_backend, "load_library", lambda: None)
    model = make_model()
    fast = speculate(model, "none", backend="general" if backend == "general" else None)
    assert fast.decoding_engine.backend == (backend or "native")
    before = fast.generate(IDS, **GREEDY)
    change(model)
    expected = model.generate(IDS, **GREEDY)
    assert change is change_type or not torch.equal(expected, before)  # it does something
    for _ in range(2):
        assert torch.equal(fast.generate(IDS, **GREEDY), expected)


@pytest.mark.parametrize("backend", [None, "torch", "general"])
@pytest.mark.parametrize("change", REFUSED)
def test_change_that_cannot_be_followed_is_refused(
    make_model, change, backend, monkeypatch
) -> None:
    if backend == "torch":  # the fastest where there is no compiled code
        monkeypatch.setattr(native_backend, "load_library", lambda: None)
    model = make_model()
    fast = speculate(model, "none", backend="general" if backend == "general" else None)
    assert fast.decoding_engine.backend == (backend or "native")
    change(model)
    for _ in range(2):
        with pytest.raises(UserError, match=REFUSED[change]):
            fast.generate(IDS, **GREEDY)


def test_model_that_is_put_back_answers_again(make_model) -> None:
    model = make_model()
    fast = speculate(model, "none")
    expected = fast.generate(IDS, **GREEDY)
    engine = fast.decoding_engine
    model.train()
    with pytest.raises(UserError, match="training mode"):
        fast.generate(IDS, **GREEDY)
    model.eval()
    assert torch.equal(fast.generate(IDS, **GREEDY), expected)
    model(IDS, output_hidden_states=True)  # transformers leaves hooks that change nothing
    assert fast.decoding_engine is engine


class Words:
    """Stands for a tokenizer."""

    chat_template = None

    def __call__(self, text, **_):
        ids = [3 + ord(letter) % 30 for letter in text]
        return {"input_ids": ids}


@pytest.mark.parametrize("change", [edit_one_number, hook_layer, attach_adapter, load_weights])
def test_guarantee_ends_with_the_model_it_was_made_for(make_model, shortcuts, change) -> None:
    model = make_model()
    options = {"policy": TopProbability(1.0), "exit_layers": [1], "kv_propagation": "copy"}
    found = calibrate(
        early_exit(model, shortcuts, **options),
        Words(),
        [f"text number {number} of many" for number in range(60)],
        0.05,
        thresholds=[1.0],
        new_tokens=2,
    )
    fast = early_exit(model, shortcuts, guarantee=found)
    fast.generate(IDS, **GREEDY)
    model.to(torch.float64).to(torch.float32)  # moved, with the same numbers
    fast.generate(IDS, **GREEDY)
    change(model)
    for run in (lambda: fast.generate(IDS, **GREEDY), lambda: fast(IDS)):
        with pytest.raises(UserError, match="guarantee no longer holds"):
            run()
    if change is hook_layer:
        with pytest.raises(UserError, match="which a guarantee does not know"):
            early_exit(model, shortcuts, guarantee=found)


def test_maps_of_the_model_before_a_training_step_are_refused(make_model, shortcuts) -> None:
    model = make_model()
    identity = speculate(model, "none").decoding_engine.adapter.identity()
    maps = copy.copy(shortcuts)
    maps.meta = {**shortcuts.meta, "model": identity}
    fast = early_exit(model, maps, policy=FixedLayer(1), exit_layers=[1])
    fast.generate(IDS, **GREEDY)
    take_optimiser_step(model)
    with pytest.raises(UserError, match="These shortcuts were made for"):
        fast.generate(IDS, **GREEDY)


# -- copies, wrappers, gradients -----------------------------------------------------------------


@pytest.mark.parametrize("made", ["lookup", "shortcut", "exit"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_are_models_of_their_own(make_model, shortcuts, made, copied) -> None:
    model = make_model()
    if made == "exit":
        fast = early_exit(model, shortcuts, policy=FixedLayer(1), exit_layers=[1])
    else:
        fast = speculate(model, made, shortcuts=shortcuts)
    expected = fast.generate(IDS, **GREEDY)
    fast.generation_config = replace_length(fast.generation_config)
    again = copied(fast)
    assert torch.equal(again.generate(IDS, **GREEDY), expected)
    assert again.generation_config.max_length == 31
    edit_in_place(model)  # the copy has weights of its own
    assert torch.equal(again.generate(IDS, **GREEDY), expected)
    shared = copy.copy(again)
    assert torch.equal(shared.generate(IDS, **GREEDY), expected)


def replace_length(config):
    config = copy.deepcopy(config)
    config.max_length = 31
    return config


class PeftModel(nn.Module):
    """Wraps a model as PEFT's class of this name does."""

    def __init__(self, model) -> None:
        super().__init__()
        self.base_model = model

    def get_base_model(self):
        return self.base_model


def test_wrappers_are_refused_with_the_model_to_give(make_model) -> None:
    for wrapper in (
        lambda model: torch.compile(model, backend="eager"),
        nn.DataParallel,
        PeftModel,
    ):
        wrapped = wrapper(make_model())
        name = type(wrapped).__name__
        with pytest.raises(
            UserError, match=rf"{name} is not .*model\._orig_mod.*get_base_model\(\)"
        ):
            speculate(wrapped)


def test_adapters_of_the_model_inside_are_used(make_model) -> None:
    model = make_model()
    attach_adapter(model)
    expected = model.generate(IDS, **GREEDY)
    assert torch.equal(speculate(model, "none").generate(IDS, **GREEDY), expected)


def test_compiled_parts_are_refused(make_model) -> None:
    model = make_model()
    model.model.layers[2].compile(backend="eager")
    with pytest.raises(UserError, match="torch\\.compile"):
        speculate(model)
    model = make_model()
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    with pytest.raises(UserError, match="torch\\.compile"):
        speculate(model)


def test_backward_through_exits_says_that_there_is_no_gradient(make_model, shortcuts) -> None:
    model = make_model().requires_grad_(True)
    fast = early_exit(model, shortcuts, policy=FixedLayer(1), exit_layers=[1])
    as_tuple = fast(IDS, labels=IDS, return_dict=False)
    for lost in (fast(IDS, labels=IDS).loss, fast(input_ids=IDS).logits.sum(), as_tuple[0]):
        with pytest.raises(UserError, match="no gradient through early exits"):
            lost.backward()
    with torch.no_grad():
        assert not fast(IDS).logits.requires_grad
    model.requires_grad_(False)
    assert not fast(IDS).logits.requires_grad
    speculate(model.requires_grad_(True), "none")(IDS, labels=IDS).loss.backward()
    assert model.lm_head.weight.grad is not None


# -- OPT-350m ------------------------------------------------------------------------------------


def test_layout_of_opt_350m_is_decoded(prompts, shortcuts) -> None:
    """Narrow embeddings with a map into the layers and one out of them, and no final norm."""
    torch.manual_seed(0)
    model = OPTForCausalLM(
        OPTConfig(
            vocab_size=40, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, ffn_dim=48,
            max_position_embeddings=64, word_embed_proj_dim=16, do_layer_norm_before=False,
            init_std=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    ).eval()  # fmt: skip
    for rows in (1, 3):
        expected = model.generate(**prompts(rows), **GREEDY)
        for drafter in ("none", "lookup", "shortcut"):
            fast = speculate(model, drafter, shortcuts=shortcuts)
            assert torch.equal(fast.generate(**prompts(rows), **GREEDY), expected)
        fast = early_exit(model, shortcuts, policy=TopProbability(1.0), exit_layers=[1, 2])
        assert torch.equal(fast.generate(**prompts(rows), **GREEDY), expected)
    fast = early_exit(
        model, shortcuts, 0.2, policy="top", exit_layers=[1], exit_vocab=torch.arange(20)
    )
    with pytest.raises(UserError, match="no head of one matrix over its states"):
        fast.generate(**prompts(1), **GREEDY)
