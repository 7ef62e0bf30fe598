"""QKClip: logits of heads above the threshold come down to it, the others stay; the same bits under any placements."""

import unittest

import pytest
import torch
import torch.nn.functional as F
from common import error_of, ranks
from optim_common import ragged
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged import InterleavedShard, RaggedShard
from torch_ragged.fsdp import fully_shard
from torch_ragged.optim import HeadRows, QKClip, QKLayer, attention_maxima


class Attention(nn.Module):
    """Four query heads, two key heads, with biases."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(12, 16), nn.Linear(12, 8), nn.Linear(12, 8)

    def heads(self, x):
        return [layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)]

    def forward(self, x):
        query, key, value = self.heads(x)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def logits(attention, x):
    """Of each query head, causal ones only."""
    query, key, _ = attention.heads(x)
    full = query @ key.repeat_interleave(2, 1).mT / 2
    return full.masked_fill(~torch.ones(full.shape[-2:], dtype=torch.bool).tril(), 0)


def test_heads_above_the_threshold_come_down_to_it_and_others_keep_their_logits():
    torch.manual_seed(0)
    attention, x = Attention().double(), torch.randn(3, 5, 12, dtype=torch.float64)
    with torch.no_grad():
        attention.q_proj.weight[4:8] *= 30  # Head 1, which shares a key head with head 0.
    clip = QKClip([QKLayer.of(attention.q_proj, attention.k_proj, 4, 2)], threshold=5.0)
    handles = clip.watch([attention])
    before, values = logits(attention, x), attention.v_proj.weight.clone()
    out = attention(x)
    assert torch.equal(out, F.scaled_dot_product_attention(*attention.heads(x), is_causal=True, enable_gqa=True))
    attention(x / 2)  # The largest of several calls counts.
    (found,) = clip.step()
    largest = before.masked_fill(before == 0, -torch.inf).amax((0, 2, 3))
    torch.testing.assert_close(found.double(), largest, rtol=1e-6, atol=0)
    scale = torch.where(largest > 5, 5 / largest, 1)
    assert scale[1] < 0.5 and scale[0] == scale[2] == scale[3] == 1
    torch.testing.assert_close(logits(attention, x), before * scale[:, None, None], rtol=1e-5, atol=1e-6)
    assert torch.equal(attention.v_proj.weight, values)
    attention(x)
    (found,) = clip.step()
    assert found.max() <= 5.0 * (1 + 1e-6)
    for handle in handles:
        handle.remove()
    attention(x)
    assert clip.step()[0].max() == -torch.inf, "nothing was read since the last step"


def test_one_key_head_per_query_head_shares_the_factor_evenly():
    weights = [nn.Linear(3, 8, bias=False) for _ in range(2)]
    before = [layer.weight.detach().clone() for layer in weights]
    QKClip([QKLayer.of(*weights, heads=2)], threshold=1.0).step([torch.tensor([4.0, 0.5])])
    for layer, old in zip(weights, before):
        torch.testing.assert_close(layer.weight.detach()[:4], old[:4] / 2, rtol=1e-6, atol=0)
        assert torch.equal(layer.weight.detach()[4:], old[4:])


def test_latent_attention_scales_the_rotary_query_alone():
    """Two heads of 3 rows without and 2 with rotary positions, and 4 of values."""
    query, key_value = nn.Parameter(torch.ones(10, 5)), nn.Parameter(torch.ones(14, 5))
    layer = QKLayer.latent(query, key_value, 2, 3, 2, 4)
    QKClip([layer], threshold=1.0).step([torch.tensor([1.0, 16.0])])
    assert query[:, 0].tolist() == [1.0] * 5 + [0.25] * 3 + [0.0625] * 2
    assert key_value[:, 0].tolist() == [1.0] * 7 + [0.25] * 3 + [1.0] * 4


def test_maxima_that_are_not_finite_change_nothing():
    layers = [nn.Linear(3, 4), nn.Linear(3, 4)]
    before = [layer.weight.detach().clone() for layer in layers]
    clip = QKClip([QKLayer.of(*layers, heads=4)], threshold=1.0)
    clip.step([torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])])
    assert all(torch.equal(layer.weight, old) for layer, old in zip(layers, before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maxima_of_attention_are_those_of_its_logits(dtype):
    torch.manual_seed(1)
    query, key = torch.randn(2, 4, 5, 8, dtype=dtype), torch.randn(2, 2, 7, 8, dtype=dtype)
    full = query.float() @ key.float().repeat_interleave(2, 1).mT * 0.3
    assert torch.equal(attention_maxima(query, key, scale=0.3), full.amax((0, 2, 3)))
    mask = torch.rand(2, 1, 5, 7) < 0.5
    assert torch.equal(attention_maxima(query, key, attn_mask=mask, scale=0.3), full.where(mask, -torch.inf).amax((0, 2, 3)))
    bias = torch.randn(5, 7)
    assert torch.equal(attention_maxima(query, key, attn_mask=bias, scale=0.3), (full + bias).amax((0, 2, 3)))


class ByKind(nn.Module):
    """Attention of two heads of size 8, computed in one of many ways."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.mask = kind, 0.0
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def logits(self, x):
        q, k = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k))
        return q, k, q @ k.mT / 8**0.5

    def forward(self, x):
        q, k, logits = self.logits(x)
        v = self.v(x).unflatten(-1, (2, 8)).transpose(1, 2)
        match self.kind:
            case "scaled_dot_product_attention":
                return F.scaled_dot_product_attention(q, k, v)
            case "dropout":  # Not by a fused kernel.
                return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
            case "without a batch":
                return torch.stack([F.scaled_dot_product_attention(*each) for each in zip(q, k, v)])
            case "in a function":
                return F.multi_head_attention_forward(
                    *(x.transpose(0, 1),) * 3, 16, 2, torch.cat([layer.weight for layer in (self.q, self.k, self.v)]), None,
                    None, None, False, 0.0, self.v.weight, None, need_weights=False
                )[0]  # fmt: skip
            case "products":
                return (logits + self.mask).softmax(-1) @ v
            case "nn.Softmax in float32":
                return nn.Softmax(-1)(logits.bfloat16().float()) @ v
            case "einsum":
                return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).div(8**0.5).softmax(-1), v)
            case "heads behind the sequence":
                return torch.einsum("bqhk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bqhk", q, k).div(8**0.5).softmax(-1), v)
            case "bmm":
                return torch.bmm(logits.flatten(0, 1).softmax(-1), v.flatten(0, 1))
            case "groups":
                return (logits.unflatten(1, (1, 2)).softmax(-1) @ v.unflatten(1, (1, 2))).flatten(1, 2)
            case "exponentials":
                return logits.exp() / logits.exp().sum(-1, keepdim=True) @ v
            case "shifted":
                return (logits - logits.amax(-1, keepdim=True)).softmax(-1) @ v
            case "nothing":
                return v


SEEN = ["scaled_dot_product_attention", "dropout", "without a batch", "in a function", "products", "nn.Softmax in float32"]
SEEN += ["einsum", "heads behind the sequence", "bmm", "groups"]


@pytest.mark.parametrize("kind", SEEN)
def test_logits_are_seen_however_attention_is_computed(kind):
    torch.manual_seed(0)
    attention, x = ByKind(kind), torch.randn(3, 5, 16)
    attention.q.weight.data.mul_(20)
    largest = attention.logits(x)[2].amax((0, 2, 3))
    clip = QKClip([QKLayer.of(attention.q, attention.k, heads=2)], threshold=1.0)
    clip.watch([attention])
    attention(x).sum().backward()
    (found,) = clip.step()
    torch.testing.assert_close(found, largest, rtol=1e-2 if "float32" in kind else 1e-5, atol=0)
    torch.testing.assert_close(attention.logits(x)[2].amax((0, 2, 3)), torch.ones(2), rtol=1e-2, atol=0)


def test_logits_of_zeros_are_seen_with_and_without_a_mask():
    """As in a layer that starts with weights of zeros: the largest of each row is 0, but no maximum was subtracted."""
    for mask in (0.0, -1e4, -torch.inf):
        attention = ByKind("products")
        attention.q.weight.data.zero_()
        attention.mask = torch.full((5, 5), mask).triu(1)
        clip = QKClip([QKLayer.of(attention.q, attention.k, heads=2)], threshold=1.0)
        clip.watch([attention])
        attention(torch.randn(3, 5, 16))
        assert torch.equal(clip.step()[0], torch.zeros(2)), mask


@pytest.mark.parametrize("kind", ["exponentials", "shifted", "nothing", "not called"])
def test_layers_whose_logits_are_not_seen_are_named_at_the_first_step(kind):
    attention, other = ByKind(kind), ByKind("products")
    clip = QKClip([QKLayer.of(each.q, each.k, heads=2) for each in (other, attention)], threshold=1e-3)
    clip.watch([other, attention])
    before = other.q.weight.clone()
    for _ in range(2):
        for module in (other, attention)[: 1 if kind == "not called" else 2]:
            module(torch.randn(3, 5, 16))
        text = error_of(clip.step)
        assert text.startswith("RuntimeError: QKClip.watch has seen no attention logits of layer 1 (ByKind), on any rank"), text
        assert torch.equal(before, other.q.weight), "nothing is scaled"
    attention.kind = "products"
    attention(torch.randn(3, 5, 16))
    clip.step()
    assert clip.step()[0].isneginf().all(), "a layer that was seen once may be left out of a step"


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_and_encoder_layers_are_seen(need_weights, batch_first):
    torch.manual_seed(0)
    options = {"batch_first": batch_first}
    x, mask = (
        torch.randn(4, 5, 16),
        torch.ones(4 if not batch_first else 5, 4 if not batch_first else 5, dtype=torch.bool).triu(1),
    )
    encoder = nn.TransformerEncoderLayer(16, 2, 32, **options)
    attention = nn.MultiheadAttention(16, 2, **options)
    calls = [(encoder, encoder.self_attn, lambda: encoder(x, src_mask=mask))]
    calls += [(attention, attention, lambda: attention(x, x, x, attn_mask=mask, need_weights=need_weights))]
    for module, inner, call in calls:
        weight = inner.in_proj_weight
        q, k = (F.linear(x if batch_first else x.transpose(0, 1), weight[i : i + 16]) for i in (0, 16))
        q, k = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in (q, k))
        largest = (q @ k.mT / 8**0.5).masked_fill(mask, -torch.inf).amax((0, 2, 3))
        clip = QKClip([QKLayer((HeadRows(weight, 2, 0, 8),), (HeadRows(weight, 2, 16, 8),))], threshold=0.1)
        clip.watch([module])
        call()
        torch.testing.assert_close(clip.step()[0], largest, rtol=1e-5, atol=1e-6)


def test_wrong_arguments_are_refused():
    q, k = nn.Linear(3, 8), nn.Linear(3, 4)
    assert "do not fit into a weight of shape (8, 3)" in error_of(lambda: HeadRows(q.weight, 3))
    assert "do not fit" in error_of(lambda: HeadRows(q.weight, 2, 5, 4))
    assert "key heads that divides it" in error_of(lambda: QKLayer.of(q, k, 2, 4))
    assert "positive threshold" in error_of(lambda: QKClip([], 1.0))
    clip = QKClip([QKLayer.of(q, k, 4, 2)])
    assert "expected shapes [(4,)], got [(2,)]" in error_of(lambda: clip.step([torch.ones(2)]))
    assert "call watch()" in error_of(clip.step)
    assert "one module per layer" in error_of(lambda: clip.watch([]))
    assert "takes a list of attention modules, one per layer, got Linear" in error_of(clip.watch, q)
    for bad in (3.0, [[1.0] * 4], "maxima"):
        assert error_of(clip.step, bad).startswith("ValueError: QKClip.step takes one maximum per query head"), bad
    assert "takes a list of QKLayer, got Linear" in error_of(QKClip, [q])
    assert "takes the Linear modules of queries and keys, got Parameter" in error_of(QKLayer.of, q.weight, k.weight, 2)
    assert "its number of heads, an int, got Parameter and '2'" in error_of(QKLayer.of, q, k, "2")
    clip.watch([attention := Attention()], first_heads=2)
    assert "computes 4 from head 2 on" in error_of(lambda: attention(torch.randn(1, 3, 12)))
    assert "3 query heads, 2 key heads" in error_of(lambda: attention_maxima(torch.ones(1, 3, 2, 2), torch.ones(1, 2, 2, 2)))
    fewer = QKClip([QKLayer.of(q, k, 8, 4)])
    fewer.watch([attention := Attention()])
    text = error_of(lambda: attention(torch.randn(1, 3, 12)))
    assert "layer 0 has 8 heads, and its module computes 4 from head 0 on: give QKClip.watch first_heads" in text, text
    attention_maxima(*torch.randn(2, 1, 4, 3, 2))  # No mode is left behind by the error.
    assert F.scaled_dot_product_attention(*torch.randn(3, 1, 1, 2, 2)).shape == (1, 1, 2, 2)


class PlacementTest(unittest.TestCase):
    @ranks(2)
    def test_layers_made_before_fully_shard_scale_what_replaces_their_weights():
        mesh = init_device_mesh("cpu", (2,))

        def trained(shard, makes_rows, order):
            torch.manual_seed(0)
            model = nn.Sequential(ByKind("products"), nn.Flatten(), nn.Linear(80, 2))
            clip = None
            for step in order:
                if step == "layer":
                    layer = QKLayer.of(model[0].q, model[0].k, heads=2)
                    if makes_rows:
                        layer = QKLayer((HeadRows(model[0].q.weight, 2),), (HeadRows(model[0].k.weight, 2),))
                elif step == "clip":
                    clip = QKClip([layer], threshold=0.01)
                elif step == "watch":
                    clip.watch([model[0]])
                else:
                    shard(model, mesh=mesh)
            model(torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))).sum().backward()
            (found,) = clip.step()
            assert found.min() > 0.01
            return model[0].q.weight.full_tensor()

        expected = trained(fully_shard, False, ("shard", "layer", "clip", "watch"))
        for shard in (fully_shard, torch_fully_shard):
            for makes_rows in (False, True):
                assert torch.equal(trained(shard, makes_rows, ("layer", "clip", "watch", "shard")), expected)
        for order in (("layer", "clip", "shard", "watch"), ("layer", "shard", "clip", "watch")):
            assert torch.equal(trained(fully_shard, True, order), expected)
            assert torch.equal(trained(torch_fully_shard, False, order), expected)
        text = error_of(trained, torch_fully_shard, True, ("layer", "clip", "shard", "watch"))
        assert "layer 0 has weights that are no parameters of its ByKind, which has DTensors" in text, text

    @ranks(2)
    def test_a_weight_that_was_replaced_by_a_plain_one_is_refused_on_every_rank():
        attention = ByKind("products")
        clip, rank = QKClip([QKLayer.of(attention.q, attention.k, heads=2)], threshold=0.01), torch.distributed.get_rank()
        clip.watch([attention])
        attention(torch.randn(3, 5, 16))
        before = attention.q.weight.clone()
        if rank == 0:
            attention.k.weight = nn.Parameter(attention.k.weight.detach().clone())
        text = error_of(clip.step)
        assert (
            "the weight of a Linear, of shape (16, 16), was replaced" if rank == 0 else "see the error of that rank"
        ) in text, text
        assert torch.equal(before, attention.q.weight)

    @ranks(4)
    def test_owned_rows_are_scaled_under_any_placements_with_one_collective():
        mesh = init_device_mesh("cpu", (2, 2))
        torch.manual_seed(0)
        fused, bias = torch.randn(24, 10), torch.randn(24)
        maxima = torch.full((4,), -torch.inf)
        maxima[mesh.get_rank()] = 3.0 + mesh.get_rank()  # Each rank computes one head.

        def layer(weight, bias):
            query = [HeadRows(each, 4, 0, 4) for each in (weight, bias)]
            return QKLayer(tuple(query), tuple(HeadRows(each, 2, 16, 2) for each in (weight, bias)))

        expected = [nn.Parameter(fused.clone()), nn.Parameter(bias.clone())]
        QKClip([layer(*expected)], threshold=4.5, group=mesh.get_group(0)).step([torch.tensor([3.0, 4.0, 5.0, 6.0])])
        assert not torch.equal(expected[0], fused)
        kinds = [
            [Shard(0), Shard(0)],
            [Replicate(), Shard(1)],
            [RaggedShard((0,), (7, 17)), Shard(1)],
            [Replicate(), ragged(1, (24, 10), 2)],
            [Replicate(), InterleavedShard(0, (4, 1, 1))],
        ]
        for placements in kinds:
            weight = nn.Parameter(distribute_tensor(fused.clone(), mesh, placements, src_data_rank=None))
            vector = nn.Parameter(distribute_tensor(bias.clone(), mesh, [Replicate(), Shard(0)], src_data_rank=None))
            clip = QKClip([layer(weight, vector)], threshold=4.5)
            with CommDebugMode() as mode:
                (found,) = clip.step([maxima])
            assert mode.get_total_counts() == 1 and found.tolist() == [3.0, 4.0, 5.0, 6.0]
            assert torch.equal(weight.full_tensor(), expected[0]), placements
            assert torch.equal(vector.full_tensor(), expected[1]), placements
        error = error_of(lambda: clip.step([maxima[: 4 - (mesh.get_rank() == 2)]]))
        assert ("got [(3,)]" if mesh.get_rank() == 2 else "another rank has no legal maxima") in error, error
        assert torch.equal(weight.full_tensor(), expected[0]), "no rank has scaled"
        partial = DTensor.from_local(fused, mesh, [Replicate(), Partial()], run_check=False)
        assert "Partial cannot be a parameter" in error_of(lambda: QKClip([layer(partial, bias)]))
