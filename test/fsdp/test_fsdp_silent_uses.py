"""Uses that FSDP2 accepts in silence, and that train nothing or train ranks differently: a warning or an error names them."""

import unittest
import warnings

import torch
import torch.distributed as dist
from common import error_of, ranks, run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import Shard
from torch.optim import SGD, Adafactor, AdamW

from torch_ragged.fsdp import ZERO1, ZERO2, FSDPModule, MixedPrecisionPolicy, fully_shard, memory_report
from torch_ragged.fsdp._fsdp_module import check_bool
from torch_ragged.optim import Muon, matrix_groups
from torch_ragged.tensor._placement_extension import _with_pending

ADVICE = "ranks diverge. Call fully_shard on a module that has them"
OPTIONS = (
    ("unshard", {}, ("async_op",)),
    ("finalize_backward", {}, ("async_op",)),
    ("set_manual_backward_finalization", {}, ("enabled",)),
    ("set_requires_gradient_sync", {"requires_gradient_sync": True}, ("requires_gradient_sync", "recurse")),
    ("set_reshard_after_forward", {"reshard_after_forward": True}, ("reshard_after_forward", "recurse")),
    ("set_reshard_after_backward", {"reshard_after_backward": True}, ("reshard_after_backward", "recurse")),
    ("set_is_last_backward", {}, ("is_last_backward",)),
    ("set_requires_all_reduce", {"requires_all_reduce": True}, ("requires_all_reduce", "recurse")),
    ("set_unshard_in_backward", {}, ("unshard_in_backward",)),
    ("set_force_sum_reduction_for_comms", {}, ("enable",)),
    ("set_reduce_scatter_unused_params", {"reduce_scatter_unused_params": True}, ("reduce_scatter_unused_params", "recurse")),
    ("set_reduce_scatter_max_input_buffers", {"max_input_buffers": 1}, ("recurse",)),
    ("set_keep_unsharded_storage", {"keep": True}, ("keep", "recurse")),
    ("set_gradient_view", {"view": "pending"}, ("recurse",)),
    ("set_reduce_wire", {"dtype": None}, ("recurse",)),
    ("set_persistent_buffers", {}, ("enable", "recurse")),
    ("set_collectives", {"name": "nccl"}, ("recurse",)),
    ("set_separate_reduce_scatter_group", {}, ("enable", "recurse")),
    ("set_allocate_memory_from_process_group_for_comm", {}, ("enable",)),
    ("zero_grad", {}, ("set_to_none",)),
)


def blocks(count=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def sharded(model, root=True, **options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options) if root else model


def warned(function, *arguments):
    """The texts of the warnings in a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*arguments)
    return [str(warning.message) for warning in caught]


def backward(model):
    model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()


def one(texts, *parts):
    assert len(texts) == 1 and all(part in texts[0] for part in parts), texts


# -- layers that no fully_shard has sharded --------------------------------------------------------------------------------


# -- gradients of another step ---------------------------------------------------------------------------------------------


class ZeroGradTest(unittest.TestCase):
    @ranks(2)
    def test_zero_grad_of_the_module_while_its_parameters_are_unsharded():
        """FSDP2 leaves the gradients of these parameters, and adds to them."""

        def full(model):
            return [param.grad.full_tensor() for param in model.parameters()]

        def between(model):
            loss = model(torch.full((2, 4), 1.0 + dist.get_rank())).sum()
            model.zero_grad()
            loss.backward()

        def raised(model):
            output = model(torch.ones(2, 4))
            output.register_hook(lambda gradient: 1 / 0)
            assert "ZeroDivisionError" in error_of(output.sum().backward)
            model.zero_grad()
            backward(model)

        def kept_in_memory(model):
            for gradient in [param.grad for param in model.parameters()]:
                gradient.add_(1)
            backward(model)
            model.zero_grad(set_to_none=False)
            backward(model)

        def unsharded_after_backward(model):
            model.set_reshard_after_backward(False)
            backward(model)
            model.zero_grad()
            backward(model)
            model.reshard()

        def unreduced(model):
            model.set_requires_gradient_sync(False)
            backward(model)
            model.set_requires_gradient_sync(True)
            between(model)

        for use in (between, raised, kept_in_memory, unsharded_after_backward, unreduced):
            for options in ({}, {"reshard_after_forward": False}, {"placements": ZERO2}):
                model = sharded(blocks(), **options)
                backward(model)
                want = full(model)
                use(model)
                for module in (model, *model):
                    module.reshard()
                for mine, theirs in zip(full(model), want, strict=True):
                    assert torch.equal(mine, theirs), (use.__name__, options)


# -- optimizers that train nothing -----------------------------------------------------------------------------------------


# -- wrong types -----------------------------------------------------------------------------------------------------------


def check_wrong_arguments(bad_rank):
    """One rank's wrong argument is an error on all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = blocks(1)
    cases = [
        ({"ignored_params": {"0.weight"}}, "TypeError: ignored_params expects a set of parameters, got '0.weight' in it"),
        ({"ignored_params": [model[0]]}, "TypeError: ignored_params expects a set of parameters, got Linear("),
        ({"ignored_params": 3}, "TypeError: ignored_params expects a set of parameters, got 3 in it"),
        (
            {"offload_policy": True},
            "TypeError: offload_policy=True is no policy: pass offload_policy=CPU",
        ),
        ({"offload_policy": CPUOffloadPolicy}, "TypeError: offload_policy=<class "),
        ({"mp_policy": MixedPrecisionPolicy}, "TypeError: mp_policy=<class "),
        (
            {"mp_policy": torch.bfloat16},
            "TypeError: mp_policy=torch.bfloat16 is no policy: pass mp_",
        ),
        ({"optional": "yes"}, "ValueError: fully_shard: optional must be a bool, got 'yes'"),
    ]
    is_bad = bad_rank in (None, dist.get_rank())
    for options, text in cases:
        found = error_of(fully_shard, model, mesh=mesh, **(options if is_bad else {}))
        assert found.startswith(text if is_bad else f"RuntimeError: fully_shard failed on rank {bad_rank}: {text}"), found
    found = error_of(fully_shard, [model[0], model[0]] if is_bad else [model[0]], mesh=mesh)
    text = "InvalidArgument: fully_shard got a Linear twice in one list: name each module once"
    assert found == (text if is_bad else f"RuntimeError: fully_shard failed on rank {bad_rank}: {text}"), found
    assert type(model[0]) is nn.Linear


class SilentUsesTest(unittest.TestCase):
    @ranks(2)
    def test_a_layer_added_after_the_root_is_named_at_the_first_forward():
        model = sharded(blocks(2))
        model.append(nn.Linear(4, 4))
        one(warned(backward, model), "2.weight, 2.bias under FSDPSequential", "added or replaced after it", ADVICE)
        optimizer = SGD(model.parameters(), lr=0.1)
        assert warned(optimizer.step) == [] and warned(backward, model) == []  # Once.
        weights = [None] * dist.get_world_size()
        dist.all_gather_object(weights, model[2].weight)
        assert not torch.equal(*weights)  # That is what the warning is about.

    @ranks(2)
    def test_a_layer_replaced_in_training_is_named_at_an_optimizers_first_step():
        model = sharded(blocks(2))
        assert warned(backward, model) == []
        model[1] = nn.Linear(4, 4)
        assert warned(backward, model) == []  # A step costs nothing.
        optimizer = AdamW(model.parameters())
        one(warned(optimizer.step), "AdamW trains parameters that fully_shard has not sharded", "1.weight, 1.bias", ADVICE)
        assert warned(optimizer.step) == []

    @ranks(2)
    def test_a_layer_replaced_behind_the_optimizer_is_named_at_the_next_checkpoint():
        """The optimizer has the parameters of the old layer. The first state dict shows it, as a checkpoint makes it."""
        model = sharded(blocks(2))
        optimizer = AdamW(model.parameters())
        backward(model)
        assert warned(optimizer.step) == [] and warned(model.state_dict) == []
        model[1] = nn.Linear(4, 4)
        assert warned(backward, model) == [] and warned(optimizer.step) == []
        one(warned(get_model_state_dict, model), "1.weight, 1.bias under FSDPSequential", ADVICE)
        assert warned(model.state_dict) == []

    @ranks(2)
    def test_a_layer_added_to_an_optimizer_is_named_at_its_next_step():
        model = sharded(blocks(2))
        optimizer = SGD(model.parameters(), lr=0.1)
        backward(model)
        assert warned(optimizer.step) == []
        model.append(nn.Linear(4, 4))
        optimizer.add_param_group({"params": model[2].parameters()})
        backward(model)
        one(warned(optimizer.step), "SGD trains parameters", "2.weight, 2.bias")

    @ranks(2)
    def test_a_layer_around_sharded_blocks_is_named_at_the_first_step():
        """No fully_shard was called on the model, so that no group's module has the name of the layer outside."""
        for names in ((), ("a", "b")):
            model, head = sharded(blocks(2), root=False), nn.Linear(4, 4)
            head(model(torch.ones(2, 4))).sum().backward()
            params = list(head.parameters())
            optimizer = SGD(
                [*model.named_parameters(), *zip(names, params, strict=True)] if names else [*model.parameters(), *params],
                lr=0.1,
            )
            what = "a parameter of shape (4, 4), a parameter of shape (4,)" if not names else "a, b"
            one(warned(optimizer.step), "SGD trains parameters that fully_shard has not sharded", f": {what}. Their", ADVICE)

    @ranks(2)
    def test_layers_that_need_no_reduction_are_not_named():
        """Frozen, ignored, of another model, without a backward, or sharded by another library."""
        model = blocks(3)
        model[1].requires_grad_(False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh, ignored_params=set(model[2].parameters()))
        model.append(nn.Linear(4, 4).requires_grad_(False))
        assert warned(backward, model) == []
        assert warned(SGD(model.parameters(), lr=0.1).step) == []
        other = nn.Linear(4, 4)
        other(torch.ones(4)).sum().backward()
        assert warned(SGD(other.parameters(), lr=0.1).step) == []
        evaluated = sharded(blocks(2))
        evaluated.append(nn.Linear(4, 4))
        with torch.no_grad():
            assert warned(evaluated, torch.ones(2, 4)) == []
        unsharded = sharded(blocks(2))
        unsharded[0].unshard()  # Its parameters are plain now.
        assert warned(backward, unsharded) == []

    @ranks(2)
    def test_an_optimizer_made_before_fully_shard_is_named():
        for make in (lambda model: AdamW(model.parameters()), lambda model: Muon(matrix_groups(model))):
            model = blocks()
            optimizer = make(model)
            sharded(model)
            backward(model)
            texts = warned(optimizer.step)
            names = (
                "0.weight, 1.weight, 2.weight and 3 more"
                if isinstance(optimizer, Muon)
                else "0.weight, 0.bias, 1.weight and 3 more"
            )
            one(
                texts,
                f"{type(optimizer).__name__} has parameters that fully_shard has replaced since: {names}. Its step does not",
            )
            assert warned(optimizer.step) == []
        model = blocks()
        groups = matrix_groups(model)
        sharded(model)
        one(
            warned(Muon(groups).step),
            "make the optimizer and its groups (such as those of matrix_groups) of model.parameters()",
        )

    @ranks(2)
    def test_an_optimizer_of_unsharded_parameters_is_refused():
        """After a forward without backward, the root's own parameters are unsharded: a step would be overwritten."""
        model, data = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
        fully_shard(model[0])
        fully_shard(model)
        model(data)
        optimizer = AdamW(model.parameters())
        model(data).sum().backward()
        told = error_of(optimizer.step)
        assert "AdamW has unsharded parameters: 1.weight, 1.bias. It was made of model.parameters() between" in told, told
        model.reshard()
        optimizer, before = AdamW(model.parameters()), [param.full_tensor() for param in model.parameters()]
        model(data).sum().backward()
        optimizer.step()
        assert not any(torch.equal(old, new.full_tensor()) for old, new in zip(before, model.parameters(), strict=True))

    @ranks(2)
    def test_an_optimizer_that_reads_numbers_of_parts_is_an_error():
        """With Shard(0), no op of a ragged placement has run on the mesh: torch would read this rank's part of the norm."""
        for options in ({"shard_placement_fn": lambda param: Shard(0)}, {}):
            _with_pending.clear()  # What other tests have left.
            model = sharded(blocks(), **options)
            model(torch.ones(2, 4)).sum().backward()
            before = [param.full_tensor().clone() for param in model.parameters()]
            told = error_of(Adafactor(model.parameters()).step)
            assert ".full_tensor().item() on all ranks" in told, told
            told = error_of(float, model[0].weight.detach().sum())  # As Prodigy, which would train on with it.
            assert ".full_tensor().item() on all ranks" in told, told
            assert all(map(torch.equal, before, [param.full_tensor() for param in model.parameters()]))

    @ranks(2)
    def test_an_optimizer_of_a_state_dicts_values_is_named():
        model = sharded(blocks())
        backward(model)
        before = [param.full_tensor() for param in model.parameters()]
        optimizer = SGD(list(model.state_dict().values()), lr=0.1)
        one(
            warned(optimizer.step),
            "SGD has tensors that share memory with parameters",
            ": 0.weight, 0.bias, 1.weight and 3 more. They get no",
        )
        assert all(torch.equal(param.full_tensor(), old) for param, old in zip(model.parameters(), before, strict=True))
        frozen = sharded(blocks())
        frozen[0].requires_grad_(False)
        backward(frozen)
        assert warned(SGD(frozen.parameters(), lr=0.1).step) == []

    @ranks(2)
    def test_a_step_without_synchronized_gradients_is_an_error():
        model = sharded(blocks())
        model.set_requires_gradient_sync(False)
        optimizer = SGD(model.parameters(), lr=0.1)
        memory_report(model)
        backward(model)
        for _ in range(4):  # At every step, not only the first ones.
            error = error_of(optimizer.step)
            assert "SGD makes a step while gradients of its parameters are not synchronized: 0.weight, 0.bias" in error, error
            assert "set_requires_gradient_sync(True)" in error and "synchronize_gradients()" in error, error
        for param in model.parameters():  # The program's own gradients are used, as those by which DCP makes states.
            param.grad = torch.zeros_like(param)
        assert warned(optimizer.step) == []
        zero1 = sharded(blocks(), placements=ZERO1)
        zero1.set_is_last_backward(False)
        backward(zero1)
        assert "set_is_last_backward(True)" in error_of(SGD(zero1.parameters(), lr=0.1).step)
        good = sharded(blocks())
        for sync in (False, True):
            good.set_requires_gradient_sync(sync)
            backward(good)
        assert warned(SGD(good.parameters(), lr=0.1).step) == []

    @ranks(2)
    def test_a_step_without_reduced_gradients_is_named():
        model = sharded(blocks())
        optimizer = SGD(model.parameters(), lr=0.1)
        model[0].unshard()
        model[0].weight.square().sum().backward()
        one(warned(optimizer.step), "SGD makes a step while gradients of its parameters are not reduced: weight, bias. They")

    @ranks(2)
    def test_a_step_in_backward_is_none_without_gradients():
        """The other layer of the optimizer is reduced later in this backward."""
        model, steps = sharded(blocks()), []
        optimizer = SGD([*model[1].parameters(), *model[2].parameters()], lr=0.1)
        model[2].weight.register_post_accumulate_grad_hook(lambda param: steps.append(warned(optimizer.step)))
        for _ in range(2):
            backward(model)
        assert steps == [[], []], steps

    @ranks(2)
    def test_a_compiled_step_is_one_graph():
        """The look at optimizers breaks no graph."""
        sharded(blocks())
        plain = nn.Linear(4, 4)
        plain(torch.ones(4)).sum().backward()
        optimizer = SGD(plain.parameters(), lr=0.1)
        before = plain.weight.clone()
        torch.compile(optimizer.step, backend="eager")()
        assert not torch.equal(plain.weight, before)

    def test_a_wrong_policy_or_list_is_an_error_on_all_ranks(self):
        for bad_rank in (None, 1):
            run_ranks(2, check_wrong_arguments, bad_rank)

    @ranks(2)
    def test_parameters_to_ignore_may_be_in_any_container():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for ignored in (set, list, tuple, iter, frozenset):
            model = blocks(1)
            fully_shard(model, mesh=mesh, ignored_params=ignored([model[0].bias]), offload_policy=None)
            assert type(model[0].bias) is nn.Parameter and type(model[0].weight) is not nn.Parameter
        fully_shard(blocks(1), mesh=mesh, ignored_params=None, offload_policy=OffloadPolicy())

    @ranks(2)
    def test_every_setter_of_a_bool_refuses_other_types():
        model = sharded(blocks(1))
        for method, options, bools in OPTIONS:
            for name in bools:
                for wrong in ("no", None, [], 1.0):
                    found = error_of(getattr(model, method), **{**options, name: wrong})
                    assert found == f"ValueError: {method}: {name} must be a bool, got {wrong!r}", found
        assert error_of(model.unshard, "x") == "ValueError: unshard: async_op must be a bool, got 'x'"
        assert (
            error_of(model.set_persistent_buffers, "x") == "ValueError: set_persistent_buffers: enable must be a bool, got 'x'"
        )
        assert error_of(model.unshard, True, 2).startswith("TypeError: FSDPModule.unshard() takes from 1 to 2 positional")
        for fine in (0, 1, 2, torch.tensor(True)):  # As FSDP2 takes them.
            model.set_requires_gradient_sync(fine)

    def test_the_list_of_setters_is_complete(self):
        annotated = {
            (name, option)
            for name, method in vars(FSDPModule).items()
            for option, kind in getattr(method, "__annotations__", {}).items()
            if kind == "bool" and not name.startswith("_")
        }
        self.assertEqual(annotated, {(name, option) for name, _, options in OPTIONS for option in options})

    def test_numbers_are_truth_values_as_in_fsdp2(self):
        for value in (True, False, 0, 5, torch.tensor(1)):
            check_bool("call", "name", value)
