"""How the package and its tests are laid out: imports, read from the sources, are what CONTRIBUTING.md says.

Nothing is imported here.
"""

import ast
import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "torch_ragged"
FSDP = f"{PACKAGE}.fsdp"
MOST_FILES_OF_CORE = 18
MOST_ARROWS_IN_CORE = 40
EVERYWHERE = None

# Private modules and names of torch that are imported outside _register/: where, and why.
PRIVATE = {
    "torch.utils._python_dispatch": (
        (
            *("_ranks.groups", "random._recording", "spmd._recorder", "spmd._static", "spmd._static_trial"),
            *("tensor._plain_ops", "tensor._redistribute"),
        ),
        "sees every op of a construction or a step that is recorded; a mesh's ranks are read "
        "while torch.compile traces; a view in place changes the shape of a DTensor",
    ),
    "torch.utils._debug_mode": (("spmd._static_trial",), "hears of every redistribution, also of those that no plan asks for"),
    "torch.utils._pytree": (EVERYWHERE, "operators' arguments nest; torch has no public way to walk them"),
    "torch.distributed.tensor.placement_types._StridedShard": (EVERYWHERE, "a placement that DTensor makes"),
    # What the patches of upstream/ have in common with this package: these modules are written to be torch's.
    "torch.distributed.tensor._dtensor_spec": (
        (
            "tensor._api",
            "tensor._copied_view",
            "tensor._dispatch",
            "tensor._placement_extension",
            "tensor._plain_ops",
            "tensor._single_device",
        ),
        "a DTensor's spec",
    ),
    "torch.distributed.tensor._op_schema": (
        (
            "tensor._copied_view",
            "tensor._dispatch",
            "tensor._ops._attention_ops",
            "tensor._placement_extension",
            "tensor._plain_ops",
        ),
        "what the dispatcher asks with",
    ),
    "torch.distributed.tensor._dispatch": (("tensor._dispatch",), "runs an op on local tensors"),
    "torch.distributed.tensor._ops": (
        ("tensor._dispatch", "tensor._ops._attention_ops"),
        "the partial placement of a norm; how a rule for one mesh dimension becomes one for several",
    ),
    "torch.distributed.tensor._redistribute": (("tensor._api",), "torch's own way between its own placements"),
    "torch.distributed.tensor._random": (("tensor._random",), "the random state that DTensor's ranks share"),
    "torch.distributed._functional_collectives": (
        ("tensor._api", "tensor._async_tensor", "tensor._dispatch", "tensor._random", "tensor._read", "tensor._single_device"),
        "a result that waits when it is used; whether torch traces",
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo": (
        ("checkpoint._chunks", "checkpoint._metadata"),
        "where DCP's files have a chunk",
    ),
    "torch.distributed._local_tensor": (("tensor._local_tensor",), "the mode in which one process simulates all ranks"),
    "torch._compile": (("tensor._dispatch",), "hides a function from Dynamo without importing it"),
    "torch._guards": (("tensor._random",), "whether torch.compile traces"),
    "torch._subclasses": (
        (
            "random._deferred",
            "random._recording",
            "spmd._recorder",
            "spmd._static_trial",
            "tensor._draw",
            "tensor._random",
            "tensor._single_device",
        ),
        "the error that breaks a graph; tensors without memory",
    ),
    # Only this module of torch's has symmetric memory.
    "torch.distributed._symmetric_memory": (
        ("fsdp.comm._choice", "fsdp.comm.experimental._multicast", "fsdp.comm.experimental._peer_memory"),
        "buffers that other ranks read and write",
    ),
}

# Assignments to what torch defines, outside _register/. Each has an entry in the registration report.
ASSIGNED = {("tensor._random", "dtensor_random._rng_tracker")}


def sources():
    """The path of each module of the package, by its name without ``torch_ragged.``; that of the package itself is ''."""
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


SOURCES = sources()
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}


def imported(name):
    """What a module imports, at the top or in a function, as (module, name in it or None)."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            yield from ((node.module, alias.name) for alias in node.names)


def modules_imported(name):
    """The package's modules that a module imports."""
    found = {f"{module}.{part}" if f"{module}.{part}" in SOURCES else module for module, part in imported(name)}
    return (found & set(SOURCES)) - {name}


IMPORTS = {name: modules_imported(name) for name in SOURCES}


def short(name):
    return name.removeprefix(f"{PACKAGE}.")


def part(name):
    """The part of the package that a module is of: a file or folder at its top. Two of _register stand for themselves."""
    return short(name) if short(name) in ("_register._torch", "_register._spmd_types") else short(name).partition(".")[0]


def wing(folder):
    """A function of modules: the part of a folder that a module is of, a folder in it or a file; None outside of it."""
    package = f"{PACKAGE}.{folder}"

    def of(name):
        if name != package and not name.startswith(f"{package}."):
            return None
        return name.removeprefix(package).strip(".").partition(".")[0] or "__init__"

    return of


def parts_imported(of):
    """The parts of the package that each part imports; ``of`` gives the part of a module, None for one that has none."""
    found = {}
    for name, others in IMPORTS.items():
        if of(name) is not None:
            found.setdefault(of(name), set()).update({of(other) for other in others} - {of(name), None})
    return found


PARTS = parts_imported(part)
WINGS = {folder: parts_imported(wing(folder)) for folder in ("_ranks", "tensor", "fsdp")}
RULES = (ROOT / "CONTRIBUTING.md").read_text()


def line_of_rules(folder):
    """The parts of a folder that CONTRIBUTING.md lists from left to right, as groups of equals."""
    text = " ".join(re.search(rf"^ *{folder}: (.*(?:\n +<- .*)*)$", RULES, re.MULTILINE)[1].split())
    return [group.strip().split(", ") for group in text.split("<-")]


def against(groups, imports):
    """The imports that point to the right, or to an equal."""
    place = {name: number for number, group in enumerate(groups) for name in group}
    return [f"{name} -> {other}" for name in place for other in imports[name] if place.get(other, -1) >= place[name]]


def circles():
    """Each set of modules that import each other, directly or not."""
    reached = {name: set(others) for name, others in IMPORTS.items()}
    for middle in reached:
        for others in reached.values():
            if middle in others:
                others |= reached[middle]
    return sorted({tuple(sorted(b for b in reached[a] if a in reached[b])) for a in reached if a in reached[a]})


def private_imports(name):
    """The private modules of torch, or private names in public modules, that a module imports: up to the first private part."""
    for module, item in imported(name):
        private = re.match(r"torch(\.[^\W_]\w*)*\._[^\W_]\w*", module if item is None else f"{module}.{item}")
        if private:
            yield private[0]


def assigned_to_torch(name):
    """The attributes and items of what a module imports from torch that it assigns to or deletes."""
    tree = TREES[name]
    names = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0] == "torch"
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            root = node.value
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            if isinstance(root, ast.Name) and root.id in names:
                yield ast.unparse(node)


class ImportsTest(unittest.TestCase):
    def test_no_modules_import_each_other_in_a_circle(self):
        self.assertEqual(circles(), [])

    def test_parts_of_a_folder_import_only_what_contributing_lists_to_their_left(self):
        apart = {"_ranks": set(), "tensor": {"_placement_extension", "_hf_storage"}, "fsdp": set()}
        for folder, imports in WINGS.items():
            groups = line_of_rules(folder)
            listed = {name for group in groups for name in group}
            self.assertEqual(listed | apart[folder] | {"__init__"}, set(imports))
            self.assertEqual(against(groups, imports), [])
            self.assertEqual({name: imports[name] for name in apart[folder] if imports[name]}, {})
            self.assertEqual({name for name, others in imports.items() if "__init__" in others}, set())
            for left, group in zip(groups, groups[1:]):
                for name in group:
                    self.assertTrue(imports[name] & set(left), f"{name} imports nothing of {left}: it belongs to the left")

    def test_core_imports_no_wing(self):
        """An argument brings what its feature needs, as an object."""
        core = [name for name in SOURCES if name.startswith(f"{FSDP}.core.")]
        wings = {name for name in WINGS["fsdp"]} - {"core", "layout", "comm"}
        found = {
            (short(name), other)
            for name in core
            for other in IMPORTS[name]
            for wing in wings
            if other.startswith(f"{FSDP}.{wing}.") or other == f"{FSDP}.{wing}" or ".integrations" in other
        }
        self.assertEqual(found, set())

    def test_core_is_few_files_with_few_imports_between_them(self):
        core = {name for name in SOURCES if re.fullmatch(rf"{FSDP}\.core\._\w+", name)}
        self.assertLessEqual(len(core), MOST_FILES_OF_CORE)
        self.assertLessEqual(sum(len(IMPORTS[name] & core) for name in core), MOST_ARROWS_IN_CORE)

    def test_parts_of_the_package_import_of_each_other_what_contributing_says(self):
        rows = re.findall(r"^ *\| `(\w+)` \| (.*) \|$", RULES, re.MULTILINE)
        told = {name: set(re.findall(r"`([\w.]+)`", others)) for name, others in rows}
        self.assertEqual({name: PARTS[name] for name in told}, told)
        top = {PACKAGE, "__main__", "debug", "_register", "_register._torch"}
        self.assertEqual({name for name in PARTS if PARTS[name]} - top, set(told) - {"_kernels"})
        self.assertNotIn("fsdp", PARTS["optim"])

    def test_private_names_of_torch_are_imported_only_where_the_list_says(self):
        found = {}
        for name in SOURCES:
            if part(name) not in ("_register", "_register._torch"):
                for private in private_imports(name):
                    found.setdefault(private, set()).add(short(name))
        unlisted = {
            private: names
            for private, names in found.items()
            if private not in PRIVATE or (PRIVATE[private][0] is not EVERYWHERE and names - set(PRIVATE[private][0]))
        }
        self.assertEqual(unlisted, {})
        listed = {private: set(names or ()) for private, (names, _) in PRIVATE.items()}
        needless = {private: names - found.get(private, set()) for private, names in listed.items() if private in found}
        self.assertEqual(set(listed) - set(found), set())
        self.assertEqual({private: names for private, names in needless.items() if names}, {})

    def test_no_module_compares_a_version_of_torch(self):
        """A build before a release is older than it by number, with the release's features: modules ask for these."""
        found = {
            short(name)
            for name in SOURCES
            for node in ast.walk(TREES[name])
            if isinstance(node, ast.Compare) and "__version__" in ast.unparse(node)
        }
        self.assertEqual(found, set())

    def test_only_the_register_assigns_to_what_torch_defines(self):
        found = {(short(name), text) for name in SOURCES if part(name) != "_register" for text in assigned_to_torch(name)}
        self.assertEqual(found, ASSIGNED)

    def test_a_tensor_is_made_on_a_device_that_is_named(self):
        """A program may set another default device: torch.set_default_device("cuda")."""
        calls = [(name, node) for name in SOURCES for node in ast.walk(TREES[name]) if isinstance(node, ast.Call)]
        made = [(name, node) for name, node in calls if ast.unparse(node.func).removeprefix("torch.") in FACTORIES]
        made = [(name, node) for name, node in made if ast.unparse(node.func).startswith("torch.")]
        self.assertGreater(len(made), 50)
        unnamed = {
            (short(name), ast.unparse(node)) for name, node in made if not {k.arg for k in node.keywords} & {"device", None}
        }
        self.assertEqual(unnamed, set())


# Names at the top of more than one module: what each means. The list may only become shorter.
DOUBLES = {
    "Phase": "spmd's INIT and RUN, which users write; what FSDP's buffers are used for next",
    "Plan": "spmd.Plan and transfer.Plan, which users write with their module",
    "Spec": "transfer.Spec, which users write; the part of torch's DTensorSpec that rules of operators read",
    "visualize": "debug.visualize draws a tensor, transfer.visualize the traffic of a plan",
    "main": "the function of a command line",
    "quantize": "one name for each code, called with its module; a Triton kernel has the name of its twin",
    "dequantize": "as quantize",
    "aten": "torch.ops.aten",
    "_aten": "torch.ops.aten",
    "_ADVICE": "what the errors of a module tell the user to do",
    "_AT_LEAST": "the oldest version of the library that a module integrates",
    "_CALL": "the name of a module's call in the errors of ranks",
}


def names_at_the_top(tree):
    """The functions, classes and constants that a module defines, but for dunder names, the logger and one-letter names."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stored = [part for target in targets for part in ast.walk(target)]
            for part in stored:
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    if len(part.id.strip("_")) > 1 and not part.id.startswith("__") and part.id != "_logger":
                        yield part.id


class NamesTest(unittest.TestCase):
    def test_a_name_at_the_top_means_one_thing(self):
        """Rename one of two so that the names say what differs, or share it."""
        places = {}
        for name in SOURCES:
            for found in names_at_the_top(TREES[name]):
                places.setdefault(found, set()).add(short(name))
        doubles = {name: sorted(found) for name, found in places.items() if len(found) > 1}
        self.assertEqual({name: found for name, found in doubles.items() if name not in DOUBLES}, {})
        self.assertEqual(set(DOUBLES) - set(doubles), set(), "these are not double any more: take them off the list")
        self.assertLessEqual(len(DOUBLES), 12)


# The functions of torch that make a tensor of no other tensor.
FACTORIES = {"arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint"}
FACTORIES |= {"randn", "randperm", "tensor", "zeros"}

# Private names of FSDP2 that torch's pipeline schedules and other programs read of a state: tests use them as these do.
NAMES_OF_FSDP2 = {"_state_ctx", "_comm_ctx", "_mp_policy", "_fsdp_param_group", "_root_post_backward_final_callback"}


def names_imported(tree):
    """The modules that a file imports, at the top or in a function, and what it takes from them, as dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)


def mocks_without_spec(tree):
    """Mocks that answer any attribute: made without ``spec`` and of nothing real."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("Mock", "MagicMock"):
            if not {keyword.arg for keyword in node.keywords} & {"spec", "spec_set", "wraps"}:
                yield ast.unparse(node)


class TestFilesTest(unittest.TestCase):
    PATHS = {path.stem: (str(path), ast.parse(path.read_text())) for path in sorted((ROOT / "test").rglob("*.py"))}
    FILES = {name: tree for name, (_, tree) in PATHS.items()}

    def test_no_test_file_imports_a_test_file(self):
        """What test files share is in helpers, whose names do not begin with test_."""
        tests = {name for name in self.FILES if name.startswith("test_")}
        self.assertGreater(len(tests), 50)
        found = {name: {part for used in names_imported(self.FILES[name]) for part in used.split(".")} for name in self.FILES}
        self.assertEqual({name: used & tests for name, used in found.items() if used & tests}, {})

    def test_only_tests_of_core_reach_into_what_is_private_in_it(self):
        nodes = [node for name in SOURCES if name.startswith(f"{FSDP}.core") for node in ast.walk(TREES[name])]
        named = [node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"]
        named += [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
        private = {name for name in named if re.match(r"_[^_]", name)} - NAMES_OF_FSDP2
        self.assertGreater(len(private), 50)
        found = {
            (name, ast.unparse(node))
            for name, (path, tree) in self.PATHS.items()
            if "fsdp/core" not in path
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr in private
            if ast.unparse(node.value) not in ("self", "cls", "_reader")
        }
        self.assertEqual(found, set())

    def test_no_mock_answers_what_its_original_does_not_have(self):
        found = {name: list(mocks_without_spec(tree)) for name, tree in self.FILES.items()}
        self.assertEqual({name: mocks for name, mocks in found.items() if mocks}, {})


class DocsTest(unittest.TestCase):
    def test_the_life_of_a_parameter_names_functions_that_are_there(self):
        """docs/design.md follows one parameter by file and function."""
        text = (ROOT / "docs/design.md").read_text()
        life = text[text.index("## Life of a parameter") :]
        steps = re.findall(r"\| `([\w./]+)`: `(\w+)` \|", life)
        self.assertGreater(len(steps), 15)
        for file, name in steps:
            tree = ast.parse((ROOT / PACKAGE / "fsdp" / file).read_text())
            kinds = (ast.FunctionDef, ast.ClassDef)
            self.assertIn(name, {node.name for node in ast.walk(tree) if isinstance(node, kinds)}, file)
