"""What ranks pass to a plan: the whole batch, or rows of their own. Other inputs, and generators that come apart, raise."""

import copy
import tempfile
import unittest
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import error_of, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_ragged import checkpoint
from torch_ragged._ranks import comparison
from torch_ragged.spmd import Plan, parallelize

FORMS = (
    'Pass the whole batch on every rank: plan.shard("<in:ids>", Shard(0), "dp") takes the rows of each rank. Or pass own rows, '
    'equally many on each rank (drop_last=True): plan.own_rows("<in:ids>", "dp")'
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(24, 8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.dropout = nn.Dropout(0.2)

    def forward(self, ids, labels=None, *, scale=1.0, extra=None):
        x = self.embedding(ids)
        x = (x + self.dropout(self.down(F.gelu(self.up(x))))) * scale
        return x if labels is None else F.cross_entropy(F.linear(x, self.embedding.weight).flatten(0, 1), labels.flatten())


def batch(seed, rows=4):
    return torch.randint(24, (rows, 6), generator=torch.Generator().manual_seed(seed))


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])


def made(plan, mesh, **options):
    torch.manual_seed(0)
    has_all = any(rule.call == "unit" for rule in plan.rules)
    return parallelize(Net(), plan if has_all else plan.default(Replicate()), mesh, **options)


def made_alone():
    torch.manual_seed(0)
    return Net()


def whole_batch():
    return Plan().shard("<in:ids>", Shard(0), "dp").shard("<in:labels>", Shard(0), "dp")


def own_rows():
    return Plan().own_rows("<in:ids>", "dp").own_rows("<in:labels>", "dp")


def error_on_all(call, *args, **kwargs):
    """The error of a call, which is the same on all ranks."""
    errors = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error_of(call, *args, **kwargs))
    assert len(set(errors)) == 1, errors
    return errors[0]


def losses_of(model, batches):
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for ids, labels in batches:
        loss = model(ids, labels=labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class FormsTest(unittest.TestCase):
    @ranks(4)
    def test_own_rows_train_as_one_device_with_the_rows_in_the_order_of_ranks():
        mesh = mesh_of(2, 2)
        dp = mesh.get_local_rank("dp")
        parts = [[batch(10 * step + rank, 3) for rank in range(2)] for step in range(3)]
        labels = [[torch.where(part % 3 == 0, -100, part) for part in each] for each in parts]  # Other numbers of them count.
        torch.manual_seed(0)
        expected = losses_of(Net(), [tuple(map(torch.cat, each)) for each in zip(parts, labels)])
        mine = [(ids[dp], wanted[dp]) for ids, wanted in zip(parts, labels)]
        for mode in ("eager", "static"):
            for with_unit in (False, True):
                plan = own_rows().shard("up.(weight|bias)", Shard(0), "tp").shard("down.weight", Shard(1), "tp")
                plan = plan.shard("down.<out>", Replicate(), "tp")
                found = losses_of(made(plan.unit("", "dp") if with_unit else plan, mesh, mode=mode), mine)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)

    @ranks(2)
    def test_own_rows_go_with_the_rules_of_a_plan_that_exists():
        mesh, ids = mesh_of(2), batch(0)
        for extra in (Plan(), whole_batch()):
            model = made(own_rows() + extra, mesh).eval()
            torch.testing.assert_close(model(ids[2 * mesh.get_rank() :][:2]).full_tensor(), made_alone().eval()(ids))

    def test_own_rows_are_an_annotation(self):
        assert own_rows() == Plan().annotate("<in:ids>", Shard(0), "dp").annotate("<in:labels>", Shard(0), "dp")
        assert "names neither an activation nor a gradient" in error_of(Plan().own_rows, "weight", "dp")

    @ranks(2)
    def test_own_rows_where_the_whole_batch_is_expected_raise_and_name_both_forms():
        mesh = mesh_of(2)
        mine = batch(mesh.get_rank())
        for plan in (whole_batch(), Plan()):
            for mode in ("eager", "static"):
                error = error_on_all(made(plan, mesh, mode=mode), mine, mine)
                assert "`<in:ids>` has other values on rank 1 than on rank 0, along mesh dimension 'dp'" in error, error
                assert "`<in:labels>` has other values" in error and FORMS in error, error

    @ranks(2)
    def test_own_rows_that_a_parameter_outside_of_the_model_computes_raise():
        mesh = mesh_of(2)
        model = parallelize(nn.Linear(6, 3), Plan().own_rows("<in>", "dp").default(Replicate()), mesh)
        prompt, rows = nn.Linear(4, 6), torch.randn(2, 4)
        told = error_of(lambda: model(prompt(rows).tanh()))
        assert "by a parameter of shape (6, 4) that is not in the model" in told, told
        model(prompt(rows).detach()).full_tensor()
        whole = parallelize(nn.Linear(6, 3), Plan().annotate("<in>", Replicate(), "dp").default(Replicate()), mesh)
        whole(prompt(rows)).sum().backward()  # Of whole inputs, each rank has the whole gradient.
        assert prompt.weight.grad is not None
        own = torch.randn(2, 6, requires_grad=True)
        model(own * 2).sum().backward()
        assert own.grad is not None
        prompt = parallelize(prompt, Plan().own_rows("<in>", "dp").default(Replicate()), mesh)
        model(prompt(rows)).sum().backward()
        assert prompt.weight.grad.placements == (Replicate(),)

    @ranks(2)
    def test_a_penalty_on_the_gradient_of_own_rows_raises_and_that_of_a_dtensor_is_one_devices():
        for shape in ((2, 1), (1, 2)):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            single = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
            plan = Plan().own_rows("<in>", "dp").shard(r"0\.(weight|bias)", Shard(0), "tp")
            plan.shard(r"2\.weight", Shard(1), "tp").default(Replicate())
            model = parallelize(copy.deepcopy(single), plan, mesh)
            x = torch.randn(4, 4, dtype=torch.float64)
            part = x.chunk(shape[0])[mesh.get_local_rank("dp")]

            def step(model, x):
                loss = model(x).square().sum()
                (gradient,) = torch.autograd.grad(loss, [x], create_graph=True)
                (loss + gradient.square().sum()).backward()

            error = error_of(step, model, part.clone().requires_grad_())
            assert "create_graph=True asks for the gradient of <in:input>, of which each rank passes its own part" in error, (
                error
            )
            step(single, x.clone().requires_grad_())
            step(model, DTensor.from_local(part, mesh, [Shard(0), Replicate()]).requires_grad_())
            whole = Plan().shard("<in>", Replicate(), "tp").shard(r"0\.(weight|bias)", Shard(0), "tp").default(Replicate())
            other = parallelize(copy.deepcopy(single), whole, mesh)
            other.zero_grad()
            step(other, x.clone().requires_grad_())
            for each in (model, other):
                for ours, expected in zip(each.parameters(), single.parameters(), strict=True):
                    torch.testing.assert_close(ours.grad.full_tensor(), expected.grad, rtol=1e-10, atol=1e-12)

    @ranks(2)
    def test_unequal_numbers_of_own_rows_raise_with_both_numbers_in_each_call():
        mesh = mesh_of(2)
        model, rank = made(own_rows(), mesh, compare_every=100), mesh.get_rank()
        for _ in range(10):
            model(batch(rank))
        advice = (
            'Its rows are own ones: along "dp", pass equally many on each rank (drop_last=True), padded to one length; along '
            "other mesh dimensions, equal ones"
        )
        for mine, shapes in (
            (batch(rank, 6 if rank else 2), "`<in:ids>` is of shape (2, 6) and torch.int64 on rank 0 and of shape (6, 6)"),
            (batch(rank)[:, rank:], "`<in:ids>` is of shape (4, 6) and torch.int64 on rank 0 and of shape (4, 5)"),
        ):
            error = error_on_all(model, mine)
            assert shapes in error and advice in error and "plan." not in error, error

    @ranks(2)
    def test_generate_takes_own_rows_as_dtensors():
        """As transformers' method, it joins tokens to the prompt outside of forward, and its mask comes from the rows there."""

        class Writing(Net):
            def generate(self, ids, attention_mask=None, stops=None):
                assert attention_mask.shape == ids.shape and stops.shape == (3,), (attention_mask, stops)
                for _ in range(2):
                    ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1) * attention_mask[:, :1]], 1)
                return ids

        mesh, stops = mesh_of(2), torch.arange(3)
        prompt, mask = batch(0), torch.tensor([[1] * 6, [0] * 6]).repeat(2, 1)
        torch.manual_seed(0)
        single = Writing().eval()
        model = parallelize(copy.deepcopy(single), own_rows().default(Replicate()), mesh)
        mine = slice(2 * mesh.get_rank(), 2 * mesh.get_rank() + 2)
        for each in (model, copy.deepcopy(model)):
            found = each.generate(prompt[mine], attention_mask=mask[mine], stops=stops)
            assert found.full_tensor().equal(single.generate(prompt, mask, stops))
            assert found.to_local().shape == (2, 8)
        assert "generate" not in vars(parallelize(copy.deepcopy(single), whole_batch().default(Replicate()), mesh))

    @ranks(2)
    def test_a_number_has_no_rows():
        model = made(Plan().own_rows("<in:ids>", "dp").own_rows("<in:scale>", "dp"), mesh_of(2))
        error = error_on_all(model, batch(0), scale=torch.tensor(2.0))
        assert "<in:scale> (rules (1,) of the plan) has 0 dimensions, and Shard(0) cuts dimension 0" in error, error

    @ranks(4)
    def test_own_rows_are_equal_along_the_other_mesh_dimensions():
        mesh = mesh_of(2, 2)
        model = made(own_rows(), mesh)
        model(batch(mesh.get_local_rank("dp")))
        assert "on rank 1 than on rank 0, along mesh dimension 'tp'" in error_on_all(model, batch(mesh.get_rank()))

    @ranks(2)
    def test_a_batch_that_the_mesh_does_not_divide_is_named_where_it_fails():
        mesh, ids = mesh_of(2), batch(0, 7)
        model, single = made(whole_batch(), mesh).eval(), made_alone().eval()
        torch.testing.assert_close(model(ids, ids).full_tensor(), single(ids, ids))  # Uneven rows are legal.
        layer = parallelize(nn.Linear(6, 3), Plan().shard("<in:input>", Shard(0), "dp").default(Replicate()), mesh)
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
        assert layer(x).full_tensor().shape == (7, 3)
        plan = Plan().own_rows("<in:input>", "tp").shard("<in:input>", Shard(0), "tp").default(Replicate())
        own = parallelize(nn.Linear(6, 3), plan, mesh_of(1, 2))
        advice = (
            "`<in:input>` has 7 rows, dp has 2 ranks. The plan cuts the whole batch (plan.shard): use drop_last=True, or pass "
            "own rows (plan.own_rows): "
        )
        for call, given, told, prefix in (
            (layer, x, "Cannot flatten unevenly sharded tensor", advice),
            (layer, x[:6], "Cannot flatten unevenly sharded tensor", ""),
            (own, x, "Cannot flatten unevenly sharded tensor", ""),
            (layer, x, "of the model", ""),
        ):
            with mock.patch.object(nn.Linear, "forward", side_effect=RuntimeError(told)):
                error = error_on_all(call, given)
                assert error == f"RuntimeError: {prefix}{told}", error


class NamesTest(unittest.TestCase):
    @ranks(1)
    def test_a_named_input_that_the_first_call_does_not_pass_warns_once():
        """Only of a forward that takes any name: for another one, parallelize raises. Its own arguments may be left out."""

        class Taking(Net):
            def forward(self, ids, labels=None, *, scale=1.0, **others):
                return self.inner(super().forward(ids, labels, scale=scale), ids, attention_mask=others.get("attention_mask"))

        class Inner(nn.Module):
            def forward(self, *args, **others):
                return args[0]

        def told(plan, **kwargs):
            model = Taking()
            model.inner = Inner()
            model = parallelize(model, plan.default(Replicate()), mesh_of(1))
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                for _ in range(2):
                    model(batch(0), **kwargs)
            return [str(each.message) for each in seen]

        mask, rule = {"attention_mask": batch(0)}, (Shard(0), "dp")
        found = told(Plan().shard("<in:atention_mask>", *rule), **mask)
        assert found == [
            "the plan names the input atention_mask of Taking, and its first call has none: the rule does nothing. Name one "
            "that is passed, such as attention_mask (got ids, attention_mask)"
        ], found
        found = told(Plan().own_rows("<in:mask>", "dp").annotate("inner.<in:hidden>", *rule))
        assert [text.split(",")[0] for text in found] == [
            "the plan names the input mask of Taking",
            "the plan names the input hidden of Inner",
        ], found
        for name in ("ids", "labels", "scale", "attention_mask"):
            assert told(Plan().annotate(f"<in:{name}>", Replicate(), "dp"), **mask) == []
        assert told(Plan().shard("inner.<in:0>", *rule).shard("inner.<in:attention_mask>", *rule), **mask) == []


class DifferencesTest(unittest.TestCase):
    @ranks(2)
    def test_arguments_of_all_kinds_are_compared():
        mesh, x = mesh_of(2), batch(0)
        rank = mesh.get_rank()
        model = made(whole_batch(), mesh)
        model(x, x) if rank else model(ids=x, labels=x)
        for told, kwargs in (
            ("`<in:scale>` is 1.0 on rank 0 and 2.0 on rank 1", {"scale": 1.0 + rank}),
            ("`<in:extra.key.1>` has other values", {"extra": {"key": [None, torch.tensor(rank)]}}),
            ("`<in:labels>` is None on rank 0 and of shape (4, 6)", {"labels": x if rank else None}),
            ("`<in:labels>` is not given on rank 0 and of shape (4, 6)", {"labels": x} if rank else {}),
            ("`<in:extra>` has other values", {"extra": distribute_tensor(torch.ones(2), mesh, [Replicate()]) * (rank + 1)}),
        ):
            assert told in (error := error_on_all(model, x, **kwargs)), error
        cut = distribute_tensor(torch.arange(4), mesh, [Shard(0)])  # Parts may differ.
        assert model(x, extra=cut).shape == (4, 6, 8)
        error = error_on_all(model.train(rank == 0), x)
        assert "training=True, gradients=True on rank 0 and training=False" in error, error

    @ranks(2)
    def test_one_call_that_differs_is_found_within_the_given_number_of_calls():
        mesh, x = mesh_of(2), batch(0)
        model = made(whole_batch(), mesh, compare_every=6)
        for number in range(1, 12):
            model(x if number != 9 or mesh.get_rank() else x.flip(0))
        assert "in call 9: `<in:ids>` has other values" in error_on_all(model, x)

    @ranks(2)
    def test_a_comparison_is_one_message():
        mesh, x = mesh_of(2), batch(0)
        for plan, messages in ((whole_batch(), 10), (own_rows(), 24)):
            model = made(plan, mesh, compare_every=12)
            with mock.patch.object(comparison, "gather_numbers", wraps=comparison.gather_numbers) as gathered:
                for _ in range(24):
                    model(x)
            assert gathered.call_count == messages and len(gathered.call_args.args[0]) == 4, gathered.call_args

    @ranks(2)
    def test_generators_that_come_apart_are_found_at_the_next_comparison():
        mesh, x = mesh_of(2), batch(0)
        for mode in ("eager", "static"):
            model = made(whole_batch(), mesh, mode=mode)
            for _ in range(2):
                model(x, x).backward()
            if mesh.get_rank() == 0:
                torch.rand(1)
            error = error_on_all(model, x, x)
            assert "the default generator of 'cpu' is in state" in error and "draw equally on all of them" in error, error

    @ranks(2)
    def test_draws_after_a_call_are_compared_and_after_one_that_raised():
        mesh, x = mesh_of(2), batch(0)
        for raises in (False, True):
            model = made(whole_batch(), mesh)
            out = model(x)
            if raises:
                assert "TypeError" in error_of(model, x, scale=None)
            if mesh.get_rank() == 0:
                torch.rand(1)
            assert "needs the same generator on all ranks" in error_of(torch.dropout, out, 0.5, True)

    @ranks(2)
    def test_ranks_of_a_model_that_draws_nothing_may_have_seeds_of_their_own():
        mesh = mesh_of(2)
        torch.manual_seed(mesh.get_rank())
        layer = parallelize(nn.Linear(6, 3), Plan().own_rows("<in>", "dp").default(Replicate()), mesh)
        layer(torch.randn(2, 6)).sum().backward()  # As a loader that shuffles each rank's own rows.
        layer(torch.randn(2, 6))
        assert "needs the same generator on all ranks" in error_of(torch.dropout, layer(torch.randn(2, 6)), 0.5, True)

    @ranks(2)
    def test_calls_that_one_rank_makes_alone_are_found():
        mesh, x = mesh_of(2), batch(0)
        model = made(Plan(), mesh)
        for _ in range(9 if mesh.get_rank() else 10):
            model.eval()(x)
        error = error_on_all(comparison.compare_before_checkpoint, model)
        assert "rank 0 made call 10 and rank 1 made call 9: call the model" in error, error

    def test_a_checkpoint_is_not_written_if_generators_have_come_apart(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, check_save, folder)

    @ranks(2)
    def test_how_often_is_a_number_that_ranks_agree_on():
        mesh = mesh_of(2)
        for wrong in (0, 1025, 2.0, True, None):
            assert "compare_every must be an integer from 1 to 1024" in error_of(made, Plan(), mesh, compare_every=wrong)
        assert "compare_every=8" in error_on_all(made, Plan(), mesh, compare_every=8 + mesh.get_rank())


def check_save(folder):
    mesh, x = mesh_of(2), batch(0)
    model = made(whole_batch(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = checkpoint.TrainState(model, optimizer, step=1)
    for _ in range(9):
        model(x, x).backward()
    checkpoint.save(folder, state)
    model(x.flip(0) if mesh.get_rank() else x)
    state.step = 2
    assert "in call 10: `<in:ids>` has other values" in error_on_all(checkpoint.save, folder, state)
    if mesh.get_rank() == 0:
        torch.rand(1)
    assert "before a checkpoint, is in state" in error_on_all(checkpoint.save, folder, state)
    assert [path.name for path in Path(folder).glob("step-*")] == ["step-00000001"]


if __name__ == "__main__":
    unittest.main()
