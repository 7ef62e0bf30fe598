"""monitor: what it counts is what the layouts say and what the buffers hold; nothing is left behind."""

import dataclasses
import json
import os
import re
import struct
import tempfile
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, fake_group, ranks, run_ranks
from fsdp_common import Boom, batch, build, loss_of, step_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from torch_ragged.fsdp import (
    buffer_layouts,
    fully_shard,
    memory_report,
    monitor,
)
from torch_ragged.fsdp._groups import named_groups as groups_of
from torch_ragged.fsdp.tools._peak_flops import device_peak, flops_per_token_of, peak_flops_of
from torch_ragged.fsdp.tools._timeline import timeline_of

KINDS = ("all_gather", "reduce_scatter", "other")
FILLING = ("compute", "optimizer", "exposed")
KEYS = {"step_s", "optimizer_s", "exposed_s", "compute_s", "buffer_bytes", "buffer_peak_bytes"}
KEYS |= {"memory_peak_bytes", "memory_reserved_bytes"}
KEYS |= {f"{kind}_{unit}" for kind in KINDS for unit in ("s", "exposed_s", "calls", "bytes")}


def numel_of(model):
    return sum(layout.numel for layout in buffer_layouts(model).values())


def short_step():
    """A step of 10/1024 s: a wait for "b" within the optimizer, and a collective whose bar has no room for a name."""
    collectives = [("all_gather", "b", 0.5, 5.0, 6.0), ("all_gather", "a", -1.0, 1.0, 2.0), ("other", "c", 9.0, 9.0, 9.625)]
    collectives = [(kind, name, *in_seconds(times)) for kind, name, *times in collectives]
    return timeline_of(10 / 1024, collectives, [in_seconds((4.0, 8.0))], 3)


def in_seconds(times):
    """Of moments in 1/1024 s, which are exact floats."""
    return tuple(time / 1024 for time in times)


def trace_of(timeline):
    with tempfile.TemporaryDirectory() as folder:
        timeline.save(os.path.join(folder, "step.json"))
        with open(os.path.join(folder, "step.json")) as file:
            return json.load(file)


def check_times(row):
    assert all(value >= 0 for value in row.values()), row
    exposed = sum(row[f"{kind}_exposed_s"] for kind in KINDS)
    assert abs(exposed - row["exposed_s"]) < 1e-9
    assert abs(row["compute_s"] + row["optimizer_s"] + row["exposed_s"] - row["step_s"]) < 1e-9
    assert all(row[f"{kind}_s"] >= row[f"{kind}_exposed_s"] for kind in KINDS)
    assert row["compute_s"] > 0


def trained_once():
    """A model that has made a step, its optimizer, and what a monitor must leave as it is."""
    model = build("ragged")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    step_of(model)
    model.zero_grad()
    return model, optimizer, [group.collectives for group in groups_of(model).values()]


def assert_steps_as_unwatched(model):
    other = build("ragged")
    other.load_state_dict(model.state_dict())
    model.zero_grad()
    for each in (model, other):
        step_of(each)
    for (name, param), (_, plain) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(param.grad.to_local(), plain.grad.to_local()), name


def fail_watched(model, optimizer, part):
    def fail(*args):
        raise KeyError(part)

    handles = []
    with monitor(model, optimizer):
        try:
            if part == "forward":
                handles.append(model.blocks[1].register_forward_pre_hook(fail))
            if part == "backward":
                handles.append(model.blocks[0].register_forward_hook(lambda module, args, output: Boom.apply(output)))
            loss = loss_of(model, batch(0, False))
            loss.backward()
            optimizer.step(fail)
        finally:
            for handle in handles:
                handle.remove()


def assert_as_before(model, optimizer, before):
    for group, collectives in zip(groups_of(model).values(), before, strict=True):
        assert group.collectives is collectives and not group.memory.gathered.events and not group.memory.gradients.events
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def errors_of_other_models():
    plain, theirs = nn.Linear(4, 4), torch_fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return [error_of(what, model) for what in (monitor, memory_report) for model in (plain, theirs, "model")]


class MonitorTest(unittest.TestCase):
    @ranks(2)
    def test_a_timeline_has_the_times_of_the_row():
        """It has the seconds of the row, without overlap of what fills the step, and is saved as a trace."""
        model = build("ragged", raf=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with monitor(model, optimizer) as watch:
            assert "call watch.step() after a training step" in error_of(lambda: watch.timeline)
            step_of(model, 0, optimizer)
            row = watch.step()
            timeline = watch.timeline
            assert (timeline.rank, timeline.seconds) == (dist.get_rank(), row["step_s"])
            spans = {kind: [span for span in timeline.spans if span.kind == kind] for kind in (*KINDS, *FILLING)}
            for kind in spans:
                assert abs(sum(span.end - span.begin for span in spans[kind]) - row[f"{kind}_s"]) < 1e-9, kind
            assert sorted(span.name for span in spans["all_gather"]) == sorted(2 * list(buffer_layouts(model)))
            assert [span.name for span in spans["reduce_scatter"]] == ["blocks.2", "blocks.1", "blocks.0", "root"]
            filling = sorted((span for kind in FILLING for span in spans[kind]), key=lambda span: (span.begin, span.end))
            assert filling[0].begin == 0.0 and filling[-1].end == timeline.seconds
            assert all(abs(a.end - b.begin) < 1e-9 for a, b in zip(filling, filling[1:]))
            step_of(model, 1)
            watch.step()
            assert watch.timeline is not timeline and not any(span.kind == "optimizer" for span in watch.timeline.spans)
        with tempfile.TemporaryDirectory() as folder:
            timeline.save(os.path.join(folder, "step.json"))
            with open(os.path.join(folder, "step.json")) as file:
                events = json.load(file)["traceEvents"]
            drawn = [event for event in events if event["ph"] == "X"]
            assert len(drawn) == len(timeline.spans) and all(event["dur"] >= 0 and event["ts"] >= 0 for event in drawn)
            assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} >= {*KINDS, *FILLING}
            for track in {event["tid"] for event in drawn}:
                mine = sorted((event["ts"], event["ts"] + event["dur"]) for event in drawn if event["tid"] == track)
                assert all(end <= begin + 1e-6 for (_, end), (begin, _) in zip(mine, mine[1:])), mine
            assert "use one of these endings" in error_of(timeline.save, os.path.join(folder, "step.pdf"))
            assert os.listdir(folder) == ["step.json"]

    def test_a_timeline_separates_what_overlaps(self):
        """Collectives that are in flight at once are in rows of their own; a wait in an optimizer's step is a wait."""
        compute = [("compute", "", *times) for times in ((0.0, 1.0), (2.0, 4.0), (8.0, 9.0), (9.625, 10.0))]
        optimizer = [("optimizer", "", 4.0, 5.0), ("optimizer", "", 6.0, 8.0)]
        exposed = [("exposed", "a", 1.0, 2.0), ("exposed", "b", 5.0, 6.0), ("exposed", "c", 9.0, 9.625)]
        first, second, other = ("all_gather", "a", -1.0, 2.0), ("all_gather", "b", 0.5, 6.0), ("other", "c", 9.0, 9.625)
        timeline = short_step()
        spans = [(span.kind, span.name, 1024 * span.begin, 1024 * span.end) for span in timeline.spans]
        self.assertEqual(spans, compute + optimizer + exposed + [first, second, other])
        expected = [{"name": "process_name", "ph": "M", "pid": 3, "args": {"name": "rank 3"}}]
        for row, track in enumerate((compute, optimizer, exposed, [first], [second], [other])):
            where, kind = {"pid": 3, "tid": row}, track[0][0]
            expected.append({"name": "thread_name", "ph": "M", **where, "args": {"name": kind}})
            expected.append({"name": "thread_sort_index", "ph": "M", **where, "args": {"sort_index": row}})
            for _, name, begin, end in track:
                times = {"ts": 1e6 * (begin + 1) / 1024, "dur": 1e6 * (end - begin) / 1024}  # None is before 0.
                expected.append({"name": f"{kind} ({name})" if name else kind, "cat": kind, "ph": "X", **where, **times})
        self.assertEqual(trace_of(timeline), {"traceEvents": expected, "displayTimeUnit": "ms"})

    def test_a_trace_of_some_spans_begins_with_the_step(self):
        timeline = short_step()
        some = dataclasses.replace(timeline, spans=tuple(span for span in timeline.spans if span.kind == "other"))
        (drawn,) = (event for event in trace_of(some)["traceEvents"] if event["ph"] == "X")
        self.assertEqual(drawn["ts"], 1e6 * 9 / 1024)

    def test_a_picture_names_wide_bars_and_the_first_row_of_a_kind(self):
        timeline = short_step()
        with tempfile.TemporaryDirectory() as folder:
            for name in ("step.png", "step.svg"):
                timeline.save(os.path.join(folder, name))
            with open(os.path.join(folder, "step.png"), "rb") as file:
                png = file.read(24)
            with open(os.path.join(folder, "step.svg")) as file:
                svg = file.read()
        # 11 inches, and of its height 1.2 and 0.36 for each of 6 rows, with 150 dots per inch.
        self.assertEqual((png[:8], struct.unpack(">II", png[16:])), (b"\x89PNG\r\n\x1a\n", (1650, 504)))
        texts = re.findall("<text [^>]*>([^<]*)</text>", svg)
        kinds, bars = ["compute", "optimizer", "exposed", "all-gather", "other"], ["a", "b", "a", "b"]
        at = texts.index("milliseconds")  # Before it are numbers.
        title = "rank 3: 9.8 ms, 26% in exposed collectives"
        self.assertEqual(texts[at:], ["milliseconds", *kinds, *bars, title])
        # Where the bars and their names lie, between the left edge and the right one, in 1/1024 s.
        edges, *boxes = [
            (min(xs), max(xs))
            for xs in (
                [float(x) for x in re.findall(r"[ML] ([\d.]+) ", path)]
                for path in re.findall(r'd="([^"]*)z\s*"', svg[svg.index('id="axes_1"') : svg.index('id="matplotlib.axis_1"')])
            )
        ]
        middles = [float(x) for x in re.findall(r'<text [^>]* x="([\d.]+)"[^>]*>[ab]</text>', svg)]
        left, width = edges[0], edges[1] - edges[0]
        found = [tuple(round(11 * (x - left) / width - 1, 4) for x in box) for box in (*boxes, middles)]
        spans = [(1024 * span.begin, 1024 * span.end) for span in timeline.spans]
        self.assertEqual(found, [*spans, (1.5, 5.5, 0.5, 3.25)])

    @ranks(2)
    def test_the_row_of_a_step_counts_what_the_layouts_say():
        model = build("ragged", raf=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        whole = numel_of(model) * 4
        shards = whole // dist.get_world_size()
        flags = sum(len(group.params) for group in groups_of(model).values())
        with monitor(model, optimizer) as watch:
            assert watch.postfix() == ""
            for step in range(3):
                step_of(model, step, optimizer)
                row = watch.step(tokens=144)
                assert set(row) == KEYS | {"tokens_per_s"} and all(type(value) is float for value in row.values())
                # Every group is gathered in forward and in backward.
                assert (row["all_gather_calls"], row["all_gather_bytes"]) == (8, 2 * whole)
                assert (row["reduce_scatter_calls"], row["reduce_scatter_bytes"]) == (4, whole)
                assert (row["other_calls"], row["other_bytes"]) == (1, flags)
                check_times(row)
                assert row["optimizer_s"] > 0 and abs(row["tokens_per_s"] * row["step_s"] - 144) < 1e-6
                assert row["buffer_bytes"] == shards < row["buffer_peak_bytes"]  # Everything gathered is freed.
                assert row["memory_peak_bytes"] >= row["memory_reserved_bytes"] > 1e7
                assert "tokens/s, " in watch.postfix() and "% in collectives, peak " in watch.postfix()

    @ranks(2)
    def test_mfu_is_what_the_formula_says():
        model = build("ragged", raf=True)
        with monitor(model) as watch:  # A CPU has no peak.
            step_of(model)
            assert watch.peak_flops is None or torch.cuda.is_available()
            assert ("mfu" in watch.step(tokens=144)) == (watch.peak_flops is not None)
        with monitor(model, flops_per_token=3e6, peak_flops=2e9) as watch:
            step_of(model)
            assert "mfu" not in watch.step()
            step_of(model)
            row = watch.step(tokens=144)
            assert type(row["mfu"]) is float and abs(row["mfu"] - 144 * 3e6 / row["step_s"] / (2 * 2e9)) < 1e-9
            assert f"tokens/s, MFU {row['mfu']:.1%}, " in watch.postfix()
        for wrong in (0, -1.0, "1e9", True):
            assert "takes a number > 0 as peak_flops" in error_of(lambda: monitor(model, peak_flops=wrong)), wrong
            assert "as flops_per_token" in error_of(lambda: monitor(model, flops_per_token=wrong)), wrong

    @ranks(2)
    def test_flops_per_token_are_those_of_products_with_whole_weights():
        """As torch counts them for tokens that pass the model: of 2 ranks, each has a half of the parameters."""
        tied = nn.Sequential(
            nn.Embedding(7, 6), nn.Linear(6, 5, bias=False), nn.Linear(5, 6, bias=False), nn.Linear(6, 7, bias=False)
        )
        counted = 6 * (30 + 30 + 42)
        assert flops_per_token_of(tied) == counted
        tied[3].weight = tied[0].weight
        tied[1].weight.requires_grad_(False)
        assert flops_per_token_of(tied) == counted - 2 * 30
        assert monitor(fully_shard(tied)).flops_per_token == counted - 2 * 30
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
            net(torch.ones(4, 6, requires_grad=True)).sum().backward()
        assert counter.get_total_flops() == 4 * flops_per_token_of(
            nn.Sequential(nn.Linear(6, 5, False), nn.Linear(5, 3, False))
        )

    def test_peaks_are_of_whole_devices_that_are_known(self):
        names = (
            "NVIDIA H100 80GB HBM3",
            "NVIDIA H100 PCIe",
            "NVIDIA H100 NVL",
            "NVIDIA A100-SXM4-80GB",
            "AMD Instinct MI300X OAM",
        )
        self.assertEqual([peak_flops_of(name) for name in names], [989e12, 756e12, 835e12, 312e12, 1307e12])
        for name in ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GB200", "NVIDIA H200 NVL", "Tesla T4", ""):
            self.assertIsNone(peak_flops_of(name))
        self.assertIsNone(device_peak(torch.device("cpu")))
        with mock.patch("torch.cuda.get_device_name", return_value="NVIDIA H200"):
            self.assertEqual(device_peak(torch.device("cuda", 0)), 989e12)

    @ranks(2)
    def test_the_row_of_an_evaluation_has_no_gradients():
        model = build("ragged", raf=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with monitor(model, optimizer) as watch:
            step_of(model, 0, optimizer)
            watch.step(tokens=144)
            with torch.no_grad():
                model(batch(0, False)[:, :-1])
            row = watch.step()
            assert set(row) == KEYS and (row["all_gather_calls"], row["all_gather_bytes"]) == (4, numel_of(model) * 4)
            assert row["buffer_bytes"] == numel_of(model) * 4 // 2
            model.blocks[0].unshard()
            unsharded = buffer_layouts(model)["blocks.0"].numel * 4
            assert watch.step()["buffer_bytes"] == row["buffer_bytes"] + unsharded
            assert (
                row["reduce_scatter_calls"] == row["other_calls"] == row["optimizer_s"] == row["reduce_scatter_exposed_s"] == 0
            )
            assert " s/step, " in watch.postfix()

    @ranks(2)
    def test_nothing_is_reduced_without_gradient_sync():
        model = build("ragged", raf=True)
        with monitor(model) as watch:
            model.set_requires_gradient_sync(False)
            step_of(model)
            assert watch.step()["reduce_scatter_calls"] == 0

    @ranks(2)
    def test_a_collective_of_the_user_is_another_one():
        model = build("ragged", raf=True)
        with monitor(model) as watch:
            step_of(model)
            watch.restart()
            with watch.collective(nbytes=40):
                dist.all_reduce(torch.ones(10))
            row = watch.step()
            assert (row["other_calls"], row["other_bytes"], row["all_gather_bytes"]) == (1, 40, 0)
            assert row["exposed_s"] == row["other_exposed_s"] == row["other_s"] > 0
            share, peak = row["exposed_s"] / row["step_s"], row["memory_peak_bytes"] / 2**30
            text = f"{row['step_s']:.3f} s/step, {share:.0%} in collectives, peak of the process {peak:.2f} GiB"
            assert watch.postfix() == text, (watch.postfix(), text)

    @fake_group(1)
    def test_a_system_without_proc_has_no_numbers_of_the_memory(self):
        with monitor(fully_shard(nn.Linear(4, 4))) as watch, mock.patch("builtins.open", side_effect=FileNotFoundError):
            row = watch.step()
        self.assertEqual((row["memory_peak_bytes"], row["memory_reserved_bytes"]), (0.0, 0.0))

    @ranks(2)
    def test_a_restart_drops_what_was_counted():
        model = build("ragged", raf=True)
        with monitor(model) as watch:
            model(batch(0, False)[:, :-1])
            watch.restart()
            assert watch.step()["all_gather_calls"] == 0

    @ranks(2)
    def test_parameters_that_stay_gathered_are_counted_once():
        kept = build("ragged", raf=False)
        whole, root = numel_of(kept) * 4, buffer_layouts(kept)["root"].numel * 4
        with monitor(kept) as watch:
            step_of(kept)
            row = watch.step()
            assert row["all_gather_bytes"] == whole and row["optimizer_s"] == 0 and root < whole
            assert row["all_gather_calls"] == len(buffer_layouts(kept)), "backward gathers nothing again"

    @ranks(2)
    def test_collectives_of_a_closure_are_no_time_of_the_optimizer():
        model, optimizer, before = trained_once()

        def closure():
            model.zero_grad()
            loss = loss_of(model, batch(0, False))
            loss.backward()
            return loss

        with monitor(model, [optimizer]) as watch:
            optimizer.step(closure)
            row = watch.step()
            assert row["all_gather_calls"] >= 4 and row["optimizer_s"] > 0
            assert abs(row["compute_s"] + row["optimizer_s"] + row["exposed_s"] - row["step_s"]) < 1e-9
        assert_as_before(model, optimizer, before)

    @ranks(2)
    def test_a_model_has_one_monitor_at_a_time():
        model, optimizer, before = trained_once()
        with monitor(model, [optimizer]) as watch:
            assert "ValueError: another monitor watches this model" in error_of(monitor, model)
            assert "takes the number of tokens of this step, or nothing, got '12'" in error_of(watch.step, "12")
        assert_as_before(model, optimizer, before)
        assert "RuntimeError: the monitor is closed" in error_of(watch.step)
        watch.close()

    @ranks(2)
    def test_errors_come_through_and_leave_the_model_as_it_was():
        """And the model goes on as one that was never watched."""
        model, optimizer, before = trained_once()
        for part in ("forward", "backward", "optimizer"):
            error = error_of(fail_watched, model, optimizer, part)
            assert error == f"KeyError: '{'boom' if part == 'backward' else part}'", error
            assert_as_before(model, optimizer, before)
            if part == "backward":
                model.reset_iter_state()
        assert_steps_as_unwatched(model)

    @fake_group(1)
    def test_what_is_no_optimizer_is_an_error_that_leaves_nothing_behind(self):
        model = fully_shard(nn.Linear(4, 4))
        for wrong in ("adam", torch.optim.SGD, lambda params: torch.optim.SGD(params)):
            error = error_of(monitor, model, [torch.optim.SGD(model.parameters()), wrong])
            self.assertIn(f"TypeError: monitor got {wrong!r} as optimizer: give ", error)
        monitor(model).close()

    @ranks(2)
    def test_work_in_flight_is_waited_for_after_the_close():
        model, _, _ = trained_once()
        with monitor(model):
            handle = model.blocks[0].unshard(async_op=True)
        handle.wait()
        model.blocks[0].reshard()
        assert_steps_as_unwatched(model)

    @ranks(2)
    def test_profiler_ranges_have_the_groups_names():
        model = build("ragged", raf=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step_of(model)
        counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("torch_ragged::")}
        hooks = ("pre_forward", "pre_backward", "post_backward")
        want = {f"torch_ragged::all_gather{wait} ({name})": 2 for name in buffer_layouts(model) for wait in ("", "_wait")}
        want |= {f"torch_ragged::reduce_scatter{wait} ({name})": 1 for name in buffer_layouts(model) for wait in ("", "_wait")}
        want |= {f"torch_ragged::{when} ({name})": 1 for name in buffer_layouts(model) for when in hooks}
        once = ("unused_parameters_all_reduce", "unused_parameters_all_reduce_wait", "root_post_backward_callback")
        want |= {f"torch_ragged::{what} (root)": 1 for what in once}
        assert counts == want, (counts, want)

    def test_other_models_are_errors(self):
        for errors in run_ranks(2, errors_of_other_models):
            for error in errors:
                self.assertRegex(
                    error, "^ValueError: expected a module that .*fully_shard was called on.*call fully_shard first$"
                )

    @ranks(2)
    def test_a_module_that_only_holds_sharded_ones_is_watched():
        holder = nn.ModuleDict({"a": fully_shard(nn.Linear(4, 4)), "b": nn.Linear(4, 4)})  # No root, but it holds one.
        with monitor(holder) as watch:
            holder["a"](torch.ones(1, 4)).sum().backward()
            assert watch.step()["all_gather_calls"] == 1
        assert [row.name for row in memory_report(holder).groups] == ["a"]
