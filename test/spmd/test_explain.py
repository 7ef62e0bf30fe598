"""explain: what one process says of a plan is what ranks do; check: all errors of a plan, before anything changes."""

import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common import error_of, fake_group, run_ranks
from expecttest import TestCase
from spmd_common import wrapped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged.spmd import Explanation, MeshShape, Plan, check, explain, parallelize
from torch_ragged.spmd._explained import Total, folded, size
from torch_ragged.tensor._random import scope

MESH = MeshShape(("dp", "tp"), (2, 2))
BLOCK = r"blocks\.\d+"
BATCH, LENGTH, WIDTH, HIDDEN = 4, 6, 8, 32
LOCAL = BATCH // 2 * LENGTH * WIDTH * 4  # Bytes of an activation of one data-parallel rank.


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


def tensor_parallel():
    plan = Plan().shard(rf"{BLOCK}\.up\.weight", Shard(0), "tp").shard(rf"{BLOCK}\.down\.weight", Shard(1), "tp")
    plan.redistribute(rf"{BLOCK}\.up.<in>", Replicate(), "tp", grad_src=Partial(), grad_dst=Replicate())
    plan.redistribute(rf"{BLOCK}\.down.<out>", Replicate(), "tp", grad_dst=Replicate())
    return plan.shard("<in:x>", Shard(0), "dp")


def sequence_parallel():
    plan = Plan().shard(rf"{BLOCK}\.up\.weight", Shard(0), "tp").shard(rf"{BLOCK}\.down\.weight", Shard(1), "tp")
    plan.shard(rf"{BLOCK}\.norm.<in>", Shard(1), "tp").shard(rf"{BLOCK}\.norm.<out>", Replicate(), "tp")
    plan.shard(rf"{BLOCK}\.down.<out>", Shard(1), "tp").shard("head.<in>", Replicate(), "tp")
    return plan.shard("<in:x>", Shard(0), "dp")


def no_boundaries():
    plan = Plan().shard(rf"{BLOCK}\.up\.weight", Shard(0), "tp").shard(rf"{BLOCK}\.down\.weight", Shard(1), "tp")
    return plan.shard("<in:x>", Shard(0), "dp")


def with_units(plan):
    return plan.unit(BLOCK, "dp")


def replicated(plan):
    return plan.default(Replicate())


PLANS = {
    "tensor parallel": lambda: replicated(tensor_parallel()),
    "sequence parallel": lambda: replicated(sequence_parallel()),
    "no boundaries": lambda: replicated(no_boundaries()),
    "tensor parallel, units": lambda: with_units(tensor_parallel()),
    "sequence parallel, units": lambda: with_units(sequence_parallel()),
}


def explanation_of(name, mesh=MESH, batch=BATCH, **options):
    return PLANS[name]().explain(Model(**options), mesh, torch.empty(batch, LENGTH, WIDTH, device="meta"))


def real_counts(name):
    """How often the second step of a real run calls each kind of collective."""
    model = parallelize(Model(), PLANS[name](), init_device_mesh("cpu", MESH.sizes, mesh_dim_names=MESH.names))
    for _ in range(2):  # In a first step, units agree on their order.
        model.zero_grad()
        with CommDebugMode() as mode:
            model(torch.ones(BATCH, LENGTH, WIDTH)).backward()
    kinds = {"allgather": "all-gather", "reducescatter": "reduce-scatter", "allreduce": "all-reduce", "alltoall": "all-to-all"}
    counts = Counter()
    for op, count in mode.get_comm_counts().items():
        text = str(op).replace("_", "").replace("c10dfunctional", "").replace("c10d", "")
        counts[next(kind for start, kind in kinds.items() if start in text)] += count
    return dict(counts)


def caused(explanation, phase, cause):
    """(source or module, op, kind, dims, bytes) of collectives."""
    return [
        (each.source or each.module, each.op, each.kind, each.dims, each.nbytes)
        for each in explanation.collectives
        if (each.phase, each.cause) == (phase, cause)
    ]


class CollectivesTest(unittest.TestCase):
    def test_collectives_are_those_of_ranks(self):
        self.check_collectives(["sequence parallel, units"])

    @pytest.mark.slow
    def test_collectives_of_all_plans_are_those_of_ranks(self):
        self.check_collectives(PLANS)

    def check_collectives(self, names):
        for name in names:
            with self.subTest(name):
                # Over gloo, a unit's reduce-scatter is an all-to-all.
                over_gloo = {("unit", "reduce-scatter"): "all-to-all"}
                counts = Counter(over_gloo.get((each.cause, each.kind), each.kind) for each in explanation_of(name).collectives)
                found = run_ranks(4, real_counts, name)
                self.assertEqual(found, [dict(counts)] * 4)

    def test_tensor_parallelism_is_an_all_reduce_per_block_and_direction(self):
        found = explanation_of("tensor parallel")
        out = [(f"blocks.{i}.down.<out>", "", "all-reduce", ("tp",), LOCAL) for i in range(2)]
        back = [(f"blocks.{i}.up.<in:input>", "", "all-reduce", ("tp",), LOCAL) for i in (1, 0)]
        self.assertEqual(caused(found, "forward", "boundary"), out)
        self.assertEqual(caused(found, "backward", "boundary"), back)

    def test_sequence_parallelism_is_a_gather_and_a_scatter_per_block_and_direction(self):
        found = explanation_of("sequence parallel")
        forward = []
        for i in range(2):
            forward.append((f"blocks.{i}.norm.<out>", "", "all-gather", ("tp",), LOCAL))
            forward.append((f"blocks.{i}.down.<out>", "", "reduce-scatter", ("tp",), LOCAL))
        self.assertEqual(caused(found, "forward", "boundary")[:4], forward)

    def test_a_unit_gathers_twice_and_scatters_once(self):
        found = explanation_of("tensor parallel, units")
        units = [each for each in found.collectives if each.cause == "unit" and each.source == "blocks.0"]
        whole = (2 * WIDTH + WIDTH * HIDDEN // 2 * 2) * 4  # Two vectors of the norm, and this rank's halves of two matrices.
        self.assertEqual(
            [(each.phase, each.kind, each.dims, each.nbytes >= whole) for each in units],
            [
                ("forward", "all-gather", ("dp",), True),
                ("backward", "all-gather", ("dp",), True),
                ("backward", "reduce-scatter", ("dp",), True),
            ],
        )
        self.assertEqual(len({each.nbytes for each in units}), 1)
        self.assertEqual(found.memory.gathered, max(each.nbytes for each in found.collectives if each.kind == "all-gather"))

    def test_a_redistribution_that_no_rule_asks_for_is_implicit_and_named(self):
        class Nonlinear(MLP):
            def forward(self, x):
                return torch.relu(self.down(self.up(x)))

        plan = Plan().shard(r"up\.weight", Shard(0), "tp").shard(r"down\.weight", Shard(1), "tp").default(Replicate())
        found = plan.shard("<in>", Shard(0), "dp").explain(Nonlinear(), MESH, torch.empty(BATCH, LENGTH, WIDTH))
        first = found.implicit[0]
        self.assertEqual((first.phase, first.module, first.source), ("forward", "", ""))
        self.assertEqual((first.op, first.dims, first.nbytes), ("aten.relu", ("tp",), LOCAL))
        self.assertIn(first.kind, ("all-reduce", "reduce-scatter"))  # What is cheapest is DTensor's choice.
        self.assertIn(f"{len(found.implicit)} collectives, ", str(found))
        self.assertIn("are implicit: no rule asks for them, and DTensor adds them.", str(found))
        self.assertEqual(explanation_of("tensor parallel").implicit, ())

        class Samples(MLP):
            def forward(self, x):
                with torch.inference_mode():  # Here DTensor takes a linear layer apart, and one op of it needs whole rows.
                    self.down(self.up(x.detach()))
                return x + self.norm(x)

        plan = Plan().shard(r"(up|down)\.weight", Shard(0), "tp").default(Replicate())
        found = plan.explain(Samples(), MESH, torch.empty(BATCH, LENGTH, WIDTH))
        self.assertEqual([(each.phase, each.op, each.kind) for each in found.implicit], [("forward", "aten.mm", "all-gather")])

    def test_a_rule_with_grad_reduces_the_gradient_once_at_its_boundary(self):
        for grad, expected in (
            (None, ("gradient", "", WIDTH * WIDTH * 4)),
            (Replicate(), ("boundary", "0.<out>", BATCH * WIDTH * 4)),
        ):
            plan = Plan().shard(r"1\.weight", Shard(0), "tp").shard("0.<out>", Replicate(), "tp", grad=grad)
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False))
            mesh = MeshShape(("tp",), (2,))
            found = plan.default(Replicate()).explain(model, mesh, torch.empty(BATCH, WIDTH)).collectives
            told = [(each.phase, each.kind, each.cause, each.source, each.nbytes) for each in found]
            self.assertEqual(told, [("backward", "all-reduce", *expected)])

    def test_totals_are_sums_of_collectives(self):
        found = explanation_of("tensor parallel")
        tp = [each.nbytes for each in found.collectives if (each.kind, each.dims) == ("all-reduce", ("tp",))]
        self.assertIn(Total("all-reduce", ("tp",), len(tp), sum(tp)), found.totals)
        self.assertEqual(sum(total.count for total in found.totals), len(found.collectives))

    def test_a_checkpointed_block_repeats_its_collectives_in_backward(self):
        class Checkpointed(Model):
            def forward(self, x):
                for block in self.blocks:
                    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                return self.head(x).mean()

        found = PLANS["sequence parallel"]().explain(Checkpointed(), MESH, torch.empty(BATCH, LENGTH, WIDTH))
        again = [each for each in caused(found, "backward", "boundary") if "norm.<out>" in each[0]]
        self.assertEqual([each[2] for each in again], ["all-gather", "reduce-scatter"] * 2)
        self.assertEqual({each[0] for each in again}, {"blocks.0.norm.<out>", "blocks.1.norm.<out>"})


class MemoryTest(unittest.TestCase):
    def test_bytes_are_those_of_the_local_tensors(self):
        found = explanation_of("tensor parallel")
        by_name = {each.name: each for each in found.tensors}
        up = by_name["blocks.1.up.weight"]
        self.assertEqual((up.shape, up.run, up.kept_bytes), ((HIDDEN, WIDTH), ("Replicate()", "Shard(0)"), HIDDEN * WIDTH * 2))
        kept = 2 * (2 * WIDTH + HIDDEN * WIDTH) * 4 + 4 * WIDTH * 4
        self.assertEqual(found.memory.parameters, kept)
        self.assertEqual(found.memory.gradients, kept)

    def test_the_optimizer_holds_what_adamw_allocates(self):
        found = explanation_of("sequence parallel, units", MeshShape(("dp", "tp"), (1, 1)), batch=BATCH)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(BATCH, LENGTH, WIDTH)).backward()
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        self.assertEqual(found.memory.optimizer, sum(value.nbytes for value in states))

    def test_units_keep_a_shard(self):
        found = explanation_of("tensor parallel, units")
        by_name = {each.name: each for each in found.tensors}
        down = by_name["blocks.0.down.weight"]
        self.assertEqual(down.kept, ("RaggedShard((0,))", "Shard(1)"))
        self.assertEqual((down.run, down.run_bytes, down.unit), (("Replicate()", "Shard(1)"), HIDDEN * WIDTH * 2, "blocks.0"))


class TracesTest(unittest.TestCase):
    def test_the_process_and_the_model_are_as_before(self):
        model, state, was_on = Model(), torch.get_rng_state(), scope.is_on
        before = {name: value.clone() for name, value in model.state_dict().items()}
        handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
        promotes = DTensor._op_dispatcher._allow_implicit_replication
        PLANS["tensor parallel, units"]().explain(model, MESH, torch.empty(BATCH, LENGTH, WIDTH))
        self.assertFalse(dist.is_initialized())
        self.assertEqual(scope.is_on, was_on)  # Another test of this process may have switched it on.
        self.assertEqual(DTensor._op_dispatcher._custom_op_handlers, handlers)
        self.assertEqual(DTensor._op_dispatcher._allow_implicit_replication, promotes)
        self.assertTrue(torch.equal(torch.get_rng_state(), state))
        self.assertEqual({type(param) for param in model.parameters()}, {nn.Parameter})
        self.assertFalse(model._forward_hooks or hasattr(model, "plan_ir"))
        for name, value in model.state_dict().items():
            self.assertTrue(torch.equal(value, before[name]), name)

    def test_an_input_that_needs_a_gradient_has_its_collectives_and_gets_no_gradient(self):
        plan = Plan().shard("weight|bias", Shard(0), "tp").default(Replicate())
        plan.redistribute("<in>", Replicate(), "tp", grad_src=Partial(), grad_dst=Replicate())
        for device in ("meta", "cpu"):
            for needs in (True, False):
                x = torch.ones(BATCH, WIDTH, device=device, requires_grad=needs)
                found = plan.explain(nn.Linear(WIDTH, HIDDEN), MESH, x)
                expected = [("<in:input>", "", "all-reduce", ("tp",), x.nbytes)] if needs else []
                self.assertEqual(caused(found, "backward", "boundary"), expected)
                self.assertIsNone(x.grad)

    def test_a_model_may_read_integers(self):
        class Reads(Model):
            def forward(self, x):
                positions = torch.arange(x.shape[1])
                return super().forward(x if positions[-1] == LENGTH - 1 else x[:0])

        found = PLANS["tensor parallel"]().explain(Reads(), MESH, torch.empty(BATCH, LENGTH, WIDTH))
        self.assertEqual(len(caused(found, "forward", "boundary")), 2)

    def test_any_world_size_runs_in_one_process(self):
        found = explanation_of("sequence parallel, units", MeshShape(("dp", "tp"), (512, 2)), batch=512)
        self.assertIn("mesh: dp=512, tp=2 (1024 ranks)", str(found))

    @pytest.mark.slow
    def test_126_layers_on_512_ranks(self):
        """Llama-3.1-405B, in about half a minute."""
        program = """
import sys, torch
from torch.distributed.tensor import Replicate, Shard
from transformers import LlamaConfig, LlamaForCausalLM
from torch_ragged.spmd import MeshShape, Plan
with torch.device("meta"):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128256, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126,
        num_attention_heads=128, num_key_value_heads=8, use_cache=False))
layer = r"model\\.layers\\.\\d+"
plan = Plan().shard(rf"{layer}\\.self_attn\\.(q|k|v)_proj\\.weight", Shard(0), "tp")
plan.shard(rf"{layer}\\.(self_attn\\.o|mlp\\.down)_proj\\.weight", Shard(1), "tp")
plan.shard(rf"{layer}\\.mlp\\.(gate|up)_proj\\.weight", Shard(0), "tp").unit(layer, "dp")
plan.shard(rf"{layer}\\.(input_layernorm|post_attention_layernorm)\\.<in>", Shard(1), "tp")
plan.shard(rf"{layer}\\.(input_layernorm|post_attention_layernorm)\\.<out>", Replicate(), "tp")
plan.shard(rf"{layer}\\.(self_attn|mlp)\\.<out:0>", Shard(1), "tp")
plan.shard("<in:input_ids>", Shard(0), "dp").shard("<in:labels>", Shard(0), "dp")
ids = torch.zeros(128, 4096, dtype=torch.int64)
found = plan.explain(model, MeshShape(("dp", "tp"), (64, 8)), input_ids=ids, labels=ids)
gathers = [each for each in found.collectives if each.cause == "unit" and each.kind == "all-gather"]
print(len(gathers), sum(each.phase == "forward" for each in gathers))
"""
        pytest.importorskip("transformers")
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900)
        self.assertEqual(ran.stdout.split(), ["253", "127"], ran.stderr[-2000:])


class TextTest(TestCase):
    def test_equal_layers_share_a_line(self):
        text = str(explanation_of("tensor parallel", layers=3))
        self.assertExpectedInline(
            text[text.index("tensor  ") :],
            """\
tensor                shape  kept         computed with  bytes kept  computed with  times
blocks.*.norm.weight  8      Replicate()  Replicate()    32 B        32 B           x 3
blocks.*.norm.bias    8      Replicate()  Replicate()    32 B        32 B           x 3
blocks.*.up.weight    32x8   tp=Shard(0)  tp=Shard(0)    512 B       512 B          x 3
blocks.*.down.weight  8x32   tp=Shard(1)  tp=Shard(1)    512 B       512 B          x 3
head.weight           4x8    Replicate()  Replicate()    128 B       128 B

boundary                action        placements   forward           backward          times
<in:x>                  shard         dp=Shard(0)
blocks.*.up.<in:input>  redistribute  Replicate()                    all-reduce 384 B  x 3
blocks.*.down.<out>     redistribute  Replicate()  all-reduce 384 B                    x 3

collectives of          phase     cause     kind        over  bytes     times
blocks.*.down.<out>     forward   boundary  all-reduce  tp    384 B     x 3
blocks.*.up.<in:input>  backward  boundary  all-reduce  tp    384 B     x 3
(root)                  backward  gradient  all-reduce  dp    3.31 KiB

per step    over  count  bytes
all-reduce  dp    1      3.31 KiB
all-reduce  tp    6      2.25 KiB

memory per rank  bytes
parameters       3.31 KiB
gradients        3.31 KiB
optimizer        6.68 KiB

Gradients are those of one device, of the loss over the whole batch: factor 1.""",
        )

    def test_rules_are_shown_with_what_they_match(self):
        found = explanation_of("tensor parallel", layers=3)
        self.assertEqual(found.rules[1].text, repr(PLANS["tensor parallel"]().rules[1]))
        self.assertEqual(found.rules[1].matched, tuple(f"blocks.{i}.down.weight" for i in range(3)))
        self.assertIn("3: blocks.*.down.weight\n", str(found))

    def test_units_in_text(self):
        text = str(explanation_of("sequence parallel, units", layers=3))
        self.assertExpectedInline(
            text[text.index("collectives of") :],
            """\
collectives of       phase     cause     kind            over  bytes     times
(root)               forward   unit      all-gather      dp    256 B
blocks.*             forward   unit      all-gather      dp    1.25 KiB  x 3
blocks.*.norm.<out>  forward   boundary  all-gather      tp    384 B     x 3
blocks.*.down.<out>  forward   boundary  reduce-scatter  tp    384 B     x 3
head.<in:input>      forward   boundary  all-gather      tp    384 B
blocks.*             backward  unit      all-gather      dp    1.25 KiB  x 3
blocks.*.down.<out>  backward  boundary  all-gather      tp    384 B     x 3
blocks.*.norm.<out>  backward  boundary  reduce-scatter  tp    384 B     x 3
blocks.*             backward  unit      reduce-scatter  dp    1.25 KiB  x 3
blocks.*             backward  unit      all-reduce      tp    64 B      x 3
(root)               backward  unit      reduce-scatter  dp    256 B
(root)               backward  unit      all-reduce      dp    13 B

per step        over  count  bytes
all-gather      dp    7      7.75 KiB
all-gather      tp    7      2.62 KiB
all-reduce      dp    1      13 B
all-reduce      tp    3      192 B
reduce-scatter  dp    4      4.00 KiB
reduce-scatter  tp    6      2.25 KiB

memory per rank  bytes
parameters       2.00 KiB
gradients        2.00 KiB
optimizer        4.05 KiB
gathered         1.25 KiB

Gradients are those of one device, of the loss over the whole batch: factor 1.""",
        )

    def test_sizes_are_exact_below_a_kib(self):
        self.assertEqual([size(n) for n in (0, 1023, 1024, 3 << 29)], ["0 B", "1023 B", "1.00 KiB", "1.50 GiB"])

    def test_names_share_a_pattern_if_they_differ_in_numbers_only(self):
        names = ["a.0.b1", "a.12.b1", "c"]
        self.assertEqual(folded(names), {"a.*.b1": ["a.0.b1", "a.12.b1"], "c": ["c"]})

    def test_json_has_everything(self):
        found = explanation_of("sequence parallel, units")
        self.assertEqual(Explanation.from_json(found.to_json()), found)

    def test_a_picture_draws_each_block_once(self):
        with tempfile.TemporaryDirectory() as folder:
            texts = {}
            for layers in (2, 5):
                path = Path(folder) / f"{layers}.svg"
                explanation_of("sequence parallel, units", layers=layers).svg(path)
                texts[layers] = [each.text for each in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
        self.assertIn("blocks.*  x 2", texts[2])
        self.assertIn("blocks.*  x 5", texts[5])
        self.assertEqual(texts[2].count("up.weight"), 1)
        self.assertIn("tp Shard(0)", texts[2])
        self.assertEqual(len(texts[2]), len(texts[5]))

    def test_a_picture_has_weights_with_their_cuts_and_arrows_below_each_other(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.svg"
            explanation_of("tensor parallel, units").svg(path)
            text = path.read_text()
        self.assertExpectedInline(
            wrapped(text.partition("</style>\n")[2]),
            """\
<rect class="paper" width="1240" height="288" fill="#ffffff"/>
<line class="flow" x1="14" y1="44" x2="14" y2="274" stroke="#7a7f87"/>
<text class="text" x="24" y="28" fill="#1a1a1a">dp=2, tp=2: weights as the model computes with them, and the
    | collectives of a step</text>
<text class="text" x="24" y="60" fill="#1a1a1a">(root)</text>
<rect class="weight" x="24" y="70" width="44" height="44" fill="#dbe9f8" stroke="#2d6cb3" stroke-dasharray="4
    | 3"><title>head.weight 4x8; dp: Replicate(), kept as RaggedShard((0, 1)); tp: Replicate(), kept as
    | Replicate(); 128 B kept on rank 0</title></rect>
<text class="text" x="24" y="128" fill="#1a1a1a">head.weight</text>
<text class="text" x="24" y="142" fill="#1a1a1a">whole</text>
<line class="asked" x1="560" y1="56" x2="600" y2="56" stroke="#2f8f3f"/>
<polygon class="asked-head" points="600,56 592,52 592,60" fill="#2f8f3f"/>
<text class="text" x="610" y="60" fill="#1a1a1a">all-gather over dp, 256 B (unit)</text>
<line class="asked" x1="560" y1="74" x2="600" y2="74" stroke="#2f8f3f"/>
<polygon class="asked-head" points="560,74 568,70 568,78" fill="#2f8f3f"/>
<text class="text" x="610" y="78" fill="#1a1a1a">reduce-scatter over dp, 256 B (unit)</text>
<line class="asked" x1="560" y1="92" x2="600" y2="92" stroke="#2f8f3f"/>
<polygon class="asked-head" points="560,92 568,88 568,96" fill="#2f8f3f"/>
<text class="text" x="610" y="96" fill="#1a1a1a">all-reduce over dp, 9 B (unit)</text>
<text class="text" x="24" y="176" fill="#1a1a1a">blocks.*  x 2</text>
<rect class="weight" x="24" y="186" width="44" height="44" fill="#dbe9f8" stroke="#2d6cb3" stroke-dasharray="4
    | 3"><title>blocks.0.up.weight 32x8; dp: Replicate(), kept as StridedRaggedShard((0, 1)); tp: Shard(0),
    | kept as Shard(0); 512 B kept on rank 0</title></rect>
<line class="cut" x1="24" y1="208" x2="68" y2="208" stroke="#2d6cb3"/>
<text class="text" x="24" y="244" fill="#1a1a1a">up.weight</text>
<text class="text" x="24" y="258" fill="#1a1a1a">tp Shard(0)</text>
<rect class="weight" x="152" y="186" width="44" height="44" fill="#dbe9f8" stroke="#2d6cb3"
    | stroke-dasharray="4 3"><title>blocks.0.down.weight 8x32; dp: Replicate(), kept as RaggedShard((0,)); tp:
    | Shard(1), kept as Shard(1); 64 B kept on rank 0</title></rect>
<line class="cut" x1="174" y1="186" x2="174" y2="230" stroke="#2d6cb3"/>
<text class="text" x="152" y="244" fill="#1a1a1a">down.weight</text>
<text class="text" x="152" y="258" fill="#1a1a1a">tp Shard(1)</text>
<line class="asked" x1="560" y1="172" x2="600" y2="172" stroke="#2f8f3f"/>
<polygon class="asked-head" points="600,172 592,168 592,176" fill="#2f8f3f"/>
<text class="text" x="610" y="176" fill="#1a1a1a">all-gather over dp, 1.25 KiB (unit)  x 2</text>
<line class="asked" x1="560" y1="190" x2="600" y2="190" stroke="#2f8f3f"/>
<polygon class="asked-head" points="600,190 592,186 592,194" fill="#2f8f3f"/>
<text class="text" x="610" y="194" fill="#1a1a1a">all-reduce over tp, 384 B (boundary, down.&lt;out&gt;)  x
    | 2</text>
<line class="asked" x1="560" y1="208" x2="600" y2="208" stroke="#2f8f3f"/>
<polygon class="asked-head" points="560,208 568,204 568,212" fill="#2f8f3f"/>
<text class="text" x="610" y="212" fill="#1a1a1a">all-gather over dp, 1.25 KiB (unit)  x 2</text>
<line class="asked" x1="560" y1="226" x2="600" y2="226" stroke="#2f8f3f"/>
<polygon class="asked-head" points="560,226 568,222 568,230" fill="#2f8f3f"/>
<text class="text" x="610" y="230" fill="#1a1a1a">all-reduce over tp, 384 B (boundary, up.&lt;in:input&gt;)  x
    | 2</text>
<line class="asked" x1="560" y1="244" x2="600" y2="244" stroke="#2f8f3f"/>
<polygon class="asked-head" points="560,244 568,240 568,248" fill="#2f8f3f"/>
<text class="text" x="610" y="248" fill="#1a1a1a">reduce-scatter over dp, 1.25 KiB (unit)  x 2</text>
</svg>""",
        )


class WrongUsesTest(TestCase):
    def test_a_plan_that_does_not_fit_raises_before_anything_runs(self):
        plan = PLANS["tensor parallel"]().shard("nothing", Shard(0), "tp")
        self.assertExpectedInline(
            error_of(plan.explain, Model(), MESH),
            """\
PlanError: the plan does not fit Model on the mesh dp=2, tp=2: 1 problem
  plan.shard("nothing", Shard(0), "tp")
    matches no parameter or buffer: no name is near it""",
        )
        self.assertEqual(error_of(plan.check, Model(), MESH), error_of(plan.explain, Model(), MESH))
        self.assertFalse(dist.is_initialized())

    def test_a_process_group_that_is_there_is_not_touched(self):
        with fake_group(2):
            text = error_of(PLANS["tensor parallel"]().explain, Model(), MESH)
            self.assertEqual(dist.get_world_size(), 2)
        self.assertExpectedInline(
            wrapped(text),
            """\
RuntimeError: explain makes a process group of its own, and this process has one already: call it before
    | init_process_group, or in another process, as the command torch-ragged-spmd explain does""",
        )

    def test_a_step_that_fails_leaves_no_process_group(self):
        self.assertIn("TypeError", error_of(PLANS["tensor parallel"]().explain, Model(), MESH, torch.empty(4), torch.empty(4)))
        self.assertFalse(dist.is_initialized())

    def test_text_that_is_no_explanation(self):
        texts = [error_of(Explanation.from_json, text) for text in ("{}", "[]", "{", '{"version": 1, "mesh": 3}')]
        self.assertExpectedInline(
            wrapped(*texts),
            """\
ValueError: the text is no explanation: it has no version 1. Pass what Explanation.to_json() returned
ValueError: the text is no explanation: it has no version 1. Pass what Explanation.to_json() returned
ValueError: the text is no explanation: Expecting property name enclosed in double quotes: line 1 column 2
    | (char 1). Pass what Explanation.to_json() returned
ValueError: the text is no explanation: 'int' object has no attribute 'items'. Pass what Explanation.to_json()
    | returned""",
        )

    def test_check_returns_what_parallelize_carries_out(self):
        plan = PLANS["tensor parallel"]()
        self.assertEqual(check(plan, Model(), MESH), plan.check(Model(), MESH))
        self.assertEqual(len(plan.check(Model(), MESH).boundaries), 5)

    def test_methods_are_the_functions(self):
        self.assertIs(Plan.explain, explain)


if __name__ == "__main__":
    unittest.main()
