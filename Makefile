# make demo, make test, make docs: on a fresh machine each makes .venv itself and installs only what it needs. VENV=path uses
# an environment of yours, and keeps its torch; TORCH=2.15.0 chooses the torch to install (2.13.0 has a small CPU build).
VENV ?= .venv
TORCH ?= 2.13.0
PYTHON ?= python3
BIN = $(VENV)/bin
READY = $(VENV)/.torch_ragged
DEMO_READY = $(VENV)/.torch_ragged-demo
DOCS_READY = $(VENV)/.torch_ragged-docs
OUT ?= out
VENVS ?= $(OUT)/venvs
CLIENTS ?= $(OUT)/clients/venvs
REHEARSAL ?= $(OUT)/rehearsal
REHEARSED = test/tensor/test_redistribute.py test/tensor/test_redistribute_autograd.py test/transfer/test_transfer.py \
	test/checkpoint/test_checkpoint.py test/checkpoint/test_checkpoint_interop.py test/checkpoint/test_train_checkpoint.py \
	test/fsdp/test_fsdp.py test/fsdp/test_fsdp_as_fsdp2.py test/fsdp/test_fsdp_composition.py test/fsdp/test_fsdp_experts.py test/fsdp/test_fsdp_knobs.py \
	test/fsdp/test_fsdp_placements.py test/fsdp/test_fsdp_segments.py test/fsdp/test_fsdp_training.py test/fsdp/test_fsdp_weights.py test/fsdp/core/test_dbuffer.py \
	test/fsdp/core/test_fsdp_backward.py test/fsdp/core/test_fsdp_core.py test/fsdp/core/test_fsdp_distribution.py \
	test/fsdp/core/test_fsdp_extension.py test/fsdp/core/test_fsdp_grad.py test/fsdp/core/test_fsdp_gradients.py test/fsdp/core/test_fsdp_init.py \
	test/fsdp/core/test_fsdp_optional.py test/fsdp/budget/test_activations.py test/fsdp/elastic/test_optimizer_states.py test/fsdp/memory/test_persistent_buffers.py \
	test/fsdp/core/test_weight_gradient.py test/fsdp/bits/test_same_bits.py test/fsdp/comm/test_reduce_wire.py test/fsdp/elastic/test_fsdp_reshard_to.py test/fsdp/offload/test_offload_files.py \
	test/fsdp/offload/test_offloaded_optimizer.py test/fsdp/offload/test_step_in_backward.py test/optim/test_adam8bit.py test/optim/test_optim_gradients.py \
	test/optim/test_owners.py test/optim/test_qk_clip.py test/optim/test_shampoo.py test/optim/test_soap.py test/spmd/test_parallelize.py
CLIENT_ENVIRONMENTS = programs torchtitan verl libraries swift llamafactory torchrec physicsnemo veomni
TORCHRUN = OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone

MUTANTS = $(if $(ALL),--all,--sample $(or $(SAMPLE),15) --seed $(or $(SEED),0))

.PHONY: demo docs test test-all test-gpu test-gpu-ranks fuzz pairs bits delays mutants patches upstream matrix clients rehearsal rehearse packages lint clean
demo: $(DEMO_READY)
	rm -rf $(OUT)/checkpoint
	$(TORCHRUN) --nproc-per-node 4 examples/train_moe.py --steps 100 --checkpoint $(OUT)/checkpoint --out $(OUT)
	$(TORCHRUN) --nproc-per-node 2 examples/train_moe.py --steps 120 --resume $(OUT)/checkpoint --out $(OUT)

# Two runs at once, of about equal times: while one starts processes or waits for its ranks, the other computes.
BESIDE = test/checkpoint test/elastic test/house test/kernels test/offline test/optim test/random test/rehearsal test/tensor test/transfer
QUICK = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow"

test: $(READY)
	mkdir -p $(OUT)
	$(QUICK) $(BESIDE) > $(OUT)/beside.log 2>&1 & beside=$$!; $(QUICK) test $(BESIDE:%=--ignore=%); code=$$?; \
	wait $$beside || code=1; cat $(OUT)/beside.log; exit $$code

test-all: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q test

# What needs a GPU: test/gpu, and the kernels against their twins. One NVIDIA GPU is enough; without one, cases are skipped.
test-gpu: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs test/gpu test/kernels

# The rehearsed tests on real GPUs and NCCL. If there are fewer GPUs than ranks, ranks share them.
test-gpu-ranks: $(READY)
	TORCH_RAGGED_TEST_DEVICE=cuda OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" $(or $(TESTS),$(REHEARSED))

# Changes one line of the package at a time and checks that a test fails: a random sample (SAMPLE=15 of each module, SEED=0), or
# ALL=1, which takes hours and writes docs/data/mutants.json; GROUPS="ownership planner" chooses modules.
mutants: $(READY)
	$(BIN)/python test/mutants/run.py $(GROUPS) $(MUTANTS) --out $(OUT)/mutants
	$(if $(ALL),$(BIN)/python test/mutants/run.py --write --out $(OUT)/mutants)

# Random models, random DTensor programs, random plans, thousands of each, against one process: overnight. CASES=10000 and
# SEED=100000 choose others.
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python test/fuzz/run.py --cases $(or $(CASES),10000) --seed $(or $(SEED),100000) --json $(OUT)/fuzz.json

# Every legal pair of values of the features of training (pairs), and of layouts, checkpoints and transfers (states), in one run
# at least, against one process; every illegal pair is refused; the same of units under plans. Eight minutes.
pairs: $(READY)
	for kind in pairs states plans placements; do OMP_NUM_THREADS=1 $(BIN)/python test/fuzz/run.py --kind $$kind --json $(OUT)/$$kind.json || exit 1; done

# The quick tests and all pairs again, while each rank sleeps a random time before it issues a collective, or waits for one: what
# hangs, or is another value, by chance only. SEED=1 chooses other times.
delays: $(READY)
	TORCH_RAGGED_TEST_DELAYS=$(or $(SEED),0) $(QUICK) test
	TORCH_RAGGED_TEST_DELAYS=$(or $(SEED),0) $(MAKE) pairs

# SameBits: every pair of features in one of 20 configurations, each on 1, 2, 3, 4, 6 and 8 ranks, to the bit of one process. Hours.
bits: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python test/fsdp/bits/run.py --steps $(or $(STEPS),200) --json $(OUT)/bits.json

# The site: out/docs/index.html. Warnings and broken links between pages are errors.
docs: $(DOCS_READY)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs $(OUT)/docs

# The patch series, made from the package's sources and upstream/core.
patches: $(READY)
	$(BIN)/python upstream/build.py --out $(OUT)/patches

# Makes the series, applies it to a copy of the installed torch and tests that.
upstream: $(READY)
	$(BIN)/python upstream/check.py --out $(OUT)/upstream

# The test suite on several versions of torch, and docs/data/compatibility.json: VENVS=path has their environments, or gets them.
matrix: $(READY)
	$(BIN)/python upstream/matrix.py --venvs $(VENVS) --json $(OUT)/matrix.json --write

# Trains programs of others with FSDP2 and with ours, each in an environment with its released version, and writes
# docs/data/programs.json, and optimizers.json if all packages are there. It installs about 20 GB; CLIENTS=path has the environments, or gets them.
clients: $(CLIENT_ENVIRONMENTS:%=$(CLIENTS)/%/.ready)
	$(CLIENTS)/torchrec/bin/python -m pip install --no-deps torchrec==1.8.0 # It requires the CUDA build of fbgemm-gpu.
	for each in $(CLIENT_ENVIRONMENTS); do \
		$(CLIENTS)/$$each/bin/python test/clients/run.py $$each --json $(OUT)/clients/$$each.json || true; done
	$(CLIENTS)/programs/bin/python test/clients/run.py --table $(CLIENT_ENVIRONMENTS:%=$(OUT)/clients/%.json)
	$(CLIENTS)/programs/bin/python -m pip install --no-deps -r test/clients/requirements-optimizers.txt
	$(CLIENTS)/programs/bin/python test/clients/optimizers.py
	for program in programs torchtitan verl; do \
		OMP_NUM_THREADS=1 $(CLIENTS)/$$program/bin/python -m pytest -q test/integrations || exit 1; done

$(CLIENTS)/%/.ready: test/clients/requirements-%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -r $<
	$(@D)/bin/python -m pip install -e ".[test]"
	touch $@

# Torch's CUDA build on stand-ins for the CUDA runtime, NCCL and kernels: no GPU is needed (rehearsal/README.md). The first time,
# it installs 5 GB. REHEARSAL=path has the environment.
rehearsal: $(REHEARSAL)/.ready
	$(REHEARSAL)/bin/python rehearsal/build.py

# The tests of the simulator, and the package's tests on "cuda" tensors and NCCL. ORDER=late, early or random, SEED=0, and
# CHECK=off, report or fail for accesses of memory that no event orders.
rehearse: rehearsal
	$(REHEARSAL)/bin/python -m pytest -q test/rehearsal
	OMP_NUM_THREADS=1 $(REHEARSAL)/bin/python -m rehearsal --order $(or $(ORDER),late) --seed $(or $(SEED),0) \
		--check $(or $(CHECK),off) -- python -m pytest -q -m "not slow" $(or $(TESTS),$(REHEARSED))

$(REHEARSAL)/.ready:
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install torch==2.11.0 "nvidia-cuda-crt==13.0.*" numpy pytest hypothesis expecttest
	touch $@

# What a registry gets, in $(OUT)/dist: an sdist and a wheel.
packages: $(READY)
	$(BIN)/python -m pip install -q build twine check-wheel-contents
	rm -rf $(OUT)/dist build
	$(BIN)/python -m build --outdir $(OUT)/dist
	$(BIN)/python -m twine check --strict $(OUT)/dist/*
	$(BIN)/check-wheel-contents $(OUT)/dist/*.whl

lint: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff format --check --line-length 88 *.md docs/*.md docs/*/*.md
	$(BIN)/python -m mypy
	$(BIN)/python docs/words.py

$(READY): EXTRA = dev
$(DEMO_READY): EXTRA = demo
$(DOCS_READY): EXTRA = docs
$(READY) $(DEMO_READY) $(DOCS_READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Once, in minutes: torch $(TORCH) and what make needs go into $(VENV)"
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -q torch==$(TORCH)
	$(BIN)/python -m pip install -q -e ".[$(EXTRA)]"
	touch $@

clean:
	rm -rf $(OUT) build dist *.egg-info
