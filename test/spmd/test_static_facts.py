"""Facts: a change of what the code of a module may read is seen, and what no guard sees is refused."""

import array
import collections
import gc
import types
import unittest
import weakref
from dataclasses import dataclass
from unittest import mock

import numpy
import torch
from common import error_of
from torch import nn

from torch_ragged.spmd._static_facts import Facts, Surroundings

STATE = {"center": False}
package = types.ModuleType("package")
package.options = types.ModuleType("package.options")
package.options.center = False


class Module(nn.Module):
    """One attribute, which is changed in place."""

    def __init__(self, value=None):
        super().__init__()
        self.value = value

    def forward(self, x):
        return x


class OneOfClass(nn.Module):
    """With ``forward``, two entries of the class are watched."""

    scale = 1

    def forward(self, x):
        return x * self.scale


class ByText(nn.Module):
    center = False

    def forward(self, x):
        return x - x.mean() if getattr(self, "center") else x  # noqa: B009


class OfPackage(nn.Module):
    def forward(self, x):
        return x - x.mean() if package.options.center else x


class ByKeyword(nn.Module):
    def forward(self, x, *, options={"center": False}):  # noqa: B006
        return x - x.mean() if options["center"] else x


class Switch:
    def __bool__(self):
        return STATE["center"]


class AsksSwitch(Module):
    def forward(self, x):
        return x - x.mean() if self.value else x


@dataclass(frozen=True, slots=True)
class Frozen:
    factors: list


class Counts(nn.Module):
    """Code around static modules, with a count of calls and a switch."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls, self.switch, self.kept = nn.Identity(), 0, 0, None

    def forward(self, x):
        self.calls += 1
        return x


class Draws(nn.Module):
    def forward(self, x):
        return x * numpy.random.rand()


class Rounds(nn.Module):
    def forward(self, x):
        return x * numpy.sqrt(2.0)


def closed():
    """A module whose code has a variable of this function, and a function that changes it."""
    scale = 1.0

    class Scaled(nn.Module):
        def forward(self, x):
            return x * scale

    def change():
        nonlocal scale
        scale += 1.0

    return Scaled(), change


class FactsTest(unittest.TestCase):
    def test_a_change_of_what_code_may_read_is_seen_and_named(self):
        here, options = __name__, ByKeyword.forward.__kwdefaults__["options"]
        for module, change, told in (
            (OneOfClass(), lambda: setattr(OneOfClass, "scale", OneOfClass.scale + 1), f"{here}.OneOfClass.scale"),
            (ByText(), lambda: setattr(ByText, "center", not ByText.center), f"{here}.ByText.center"),
            (OfPackage(), lambda: setattr(package.options, "center", not package.options.center), "package.options.center"),
            (ByKeyword(), lambda: options.update(center=not options["center"]), "ByKeyword.forward['options'].center"),
            (AsksSwitch(Switch()), lambda: STATE.update(center=not STATE["center"]), f"{here}.STATE.center"),
            (one := Module(Frozen([1])), lambda: one.value.factors.append(2), "Module.value.factors"),
            (two := Module(collections.deque([1])), lambda: two.value.append(2), "Module.value"),
            (three := Module({"wide": 1}), lambda: three.value.update(tall=three.value.pop("wide")), "Module.value.tall"),
            (four := Module([torch.ones(2)]), lambda: four.value[0].requires_grad_(), "Module.value"),
            (*closed(), f"{here}.closed.<locals>.Scaled.forward"),
        ):
            facts = Facts(module)
            self.assertTrue(facts.hold(), told)
            change()
            self.assertFalse(facts.hold(), told)
            self.assertTrue(facts.changed().endswith(told), facts.changed())

    def test_objects_whose_state_no_guard_sees_have_no_facts(self):
        for value, kind in (
            (numpy.ones(2), "ndarray"),
            (array.array("d", [1.0]), "array"),
            (bytearray(2), "bytearray"),
        ):
            told = error_of(Facts, Module(value))
            self.assertEqual(told, f"NoFacts: Module.value is a {kind}, whose state no guard sees")
        self.assertIn("is an iterator, whose state no guard sees", error_of(Facts, Module(iter([1]))))

    def test_code_that_draws_numbers_of_numpy_has_no_facts(self):
        told = "NoFacts: Draws.forward reads random, which no guard sees"
        self.assertEqual(error_of(Facts, Draws()), told)
        with mock.patch.dict(vars(numpy)):  # As before its first use: numpy imports it then.
            del numpy.random
            self.assertEqual(error_of(Facts, Draws()), told)
        self.assertTrue(Facts(Rounds()).hold())

    def test_a_model_of_many_modules_has_facts(self):
        model = nn.Sequential(*(nn.Identity() for _ in range(1500)))
        self.assertTrue(Facts(model).hold())


class SurroundingsTest(unittest.TestCase):
    def test_new_hooks_and_what_forwards_change_are_no_other_program(self):
        module, around = Counts(), Surroundings()
        around.look_at([module])
        numbers = [around.number()]
        module(1)
        around.settle()
        for _ in range(2):
            numbers.append(around.number())
            module(1)
            around.settle()
        module.inner.register_forward_hook(lambda *_: None)
        module.register_forward_hook(lambda *_: None)
        around.look_at([module])
        numbers.append(around.number())
        self.assertEqual(numbers, [0, 0, 0, 0])

    def test_each_value_of_a_switch_is_a_program_until_there_are_too_many(self):
        module, around, numbers = Counts(), Surroundings(), []
        around.look_at([module])
        for switch in [*range(70), 0, 1, 69]:
            module.switch = switch
            numbers.append(around.number())
            around.settle()
        self.assertEqual(numbers[0], 0)
        self.assertEqual(len(set(numbers)), 65)  # 64, and all further ones are one.
        self.assertEqual(numbers[-3:], [*numbers[:2], numbers[64]])

    def test_a_tensor_that_a_forward_has_stored_is_freed_and_no_other_program(self):
        module, around = Counts(), Surroundings()
        module.kept = torch.ones(2, requires_grad=True) * 2
        around.look_at([module])
        self.assertEqual(around.number(), 0)
        kept = weakref.ref(module.kept)
        module.kept = torch.ones(2, requires_grad=True) * 3
        gc.collect()
        self.assertIsNone(kept())
        self.assertEqual(around.number(), 0)


if __name__ == "__main__":
    unittest.main()
