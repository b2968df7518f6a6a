# Everything runs in its own environment, .venv. PYTHON picks the interpreter that makes it (3.10 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Compiled modules of tests and of crossrank are kept, whatever the shell says: every rank of every test imports them.
unexport PYTHONDONTWRITEBYTECODE
STAMP := $(VENV)/installed
TOOLS := $(VENV)/installed-tools
DEMO := demo-recording
# More than cores: ranks of tests wait for each other, and for hangs.
WORKERS ?= 5

.PHONY: mutate demo examples quick test lock audit gpu gpu-cpu gpu-wheels stand-in stand-in-environment sanitize lint docs bench proto clean

# requirements/ has the tested versions with their hashes. PyTorch has none there: which build a machine gets is its own
# affair. Editable by a path, not a finder: else a script beside the checkout would import that folder as the package.
PIP := $(BIN)/python -m pip install --quiet
$(TOOLS): pyproject.toml constraints.txt requirements/tools.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "crossrank needs Python 3.10 or newer: make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes -r requirements/tools.txt
	$(PIP) -c constraints.txt torch
	$(PIP) --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	@touch $@

# What tests, documentation and lint need besides.
$(STAMP): $(TOOLS) requirements/dev.txt
	$(PIP) --require-hashes -r requirements/dev.txt
	@touch $@

# The newest versions of everything, for each Python and system, without PyTorch but with what it needs in each build.
lock:
	$(BIN)/uv pip compile --quiet $(LOCK) --extra tools --extra dev -o requirements/dev.txt
	$(BIN)/uv pip compile --quiet $(LOCK) --extra tools -c requirements/dev.txt -o requirements/tools.txt
LOCK := pyproject.toml requirements/beside.in --universal --python-version 3.10 --generate-hashes --no-annotate \
  --no-header --upgrade --override requirements/without-torch.txt --no-emit-package torch

# Whether a version of requirements/ has a known vulnerability. Needs PyPI's own data.
audit: $(STAMP)
	$(BIN)/pip-audit --requirement requirements/dev.txt --disable-pip --progress-spinner off

# The whole story, on four gloo ranks that pose as two nodes: what was recorded, its traces linked, converted for
# simulators and simulated, a look whether all is well, how fast it was, the communication replayed without the model,
# a whole step replayed with its computation, and all of it on one timeline and one page. Then a job that hangs says
# why while it hangs.
demo: $(TOOLS)
	rm -rf $(DEMO) $(DEMO)-chakra $(DEMO)-replay $(DEMO)-hang
	OMP_NUM_THREADS=1 TRACING=ALL TRACING_DIR=$(DEMO) $(BIN)/torchrun --standalone --nproc-per-node 4 examples/demo.py
	$(BIN)/crossrank inspect $(DEMO)
	$(BIN)/crossrank link $(DEMO)
	$(BIN)/crossrank convert $(DEMO) -o $(DEMO)-chakra
	$(BIN)/crossrank simulate $(DEMO) --leave-one-out
	$(BIN)/crossrank diagnose $(DEMO)
	$(BIN)/crossrank bandwidth $(DEMO)
	$(BIN)/crossrank replay $(DEMO) --check
	$(BIN)/crossrank replay $(DEMO) --compute -o $(DEMO)-replay
	$(BIN)/crossrank timeline $(DEMO)
	$(BIN)/crossrank report $(DEMO) --replay $(DEMO)-replay
	OMP_NUM_THREADS=1 TRACING=ALL TRACING_DIR=$(DEMO)-hang \
		$(BIN)/torchrun --standalone --nproc-per-node 4 examples/hang.py
	@echo
	@echo "Open these:"
	@echo "  $(CURDIR)/$(DEMO)/report.html            the run on one page, in a browser"
	@echo "  $(CURDIR)/$(DEMO)/timeline.pftrace       all ranks on one timeline, in ui.perfetto.dev"
	@echo "  $(CURDIR)/$(DEMO)-replay/replay.html     the replay against the recording"
	@echo "  $(CURDIR)/$(DEMO)-chakra                 Chakra traces for ASTRA-sim and others"
	@echo "  $(CURDIR)/$(DEMO)                        the recording itself"

# Every example with a framework, with and without recording.
examples: $(STAMP)
	$(PIP) -c constraints.txt --config-settings editable_mode=compat -e ".[examples]"
	$(BIN)/python -m pytest tests/integration/test_framework_examples.py

# Style, types, and the tests that run what has changed since they ran last, those of most time left out.
quick: lint
	@test -e .testmondata || { echo "crossrank: run 'make test' once: it notes what each test runs, in .testmondata"; exit 2; }
	$(BIN)/python -m pytest -q -n 3 --testmon --at-most 60

# All tests; but for CI, what each of them runs is noted for `make quick`.
test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10 $(if $(CI),,--testmon-noselect)

# With NCCL on a machine with one GPU, within ten minutes; the results are in gpu-results-cuda. On a machine without a
# network: `make gpu-wheels` elsewhere first, and then `bash tests/gpu/without_network.sh`.
gpu: $(STAMP)
	CROSSRANK_GPU_TESTS=cuda $(BIN)/python -m pytest -c tests/gpu/pytest.ini --rootdir . tests/gpu

# What of it runs without a GPU, with gloo; the results are in gpu-results-cpu.
gpu-cpu: $(STAMP)
	CROSSRANK_GPU_TESTS=cpu $(BIN)/python -m pytest -c tests/gpu/pytest.ini --rootdir . tests/gpu

# What needs CUDA and NCCL, on a stand-in for both: tests/stand_in/README.md. Its environment has PyTorch's CUDA build,
# which takes 5 GB, and the oldest versions of everything else that crossrank says it runs with. Outside CI the live
# faults run once more, with an NCCL of which each call blocks in its launch.
STAND_IN := .stand-in/environment
WITH_GPUS := PATH="$(CURDIR)/$(STAND_IN)/bin:$$PATH" tests/stand_in/with_gpus
stand-in: $(STAND_IN)/installed
	$(WITH_GPUS) 8 python -m pytest -q -n 4 --dist worksteal tests/stand_in
	CROSSRANK_GPU_TESTS=cuda STAND_IN_NCCL_GBPS=0.1 $(WITH_GPUS) 1 \
	  python -m pytest -c tests/gpu/pytest.ini --rootdir . -n 4 --dist worksteal tests/gpu
	STAND_IN_QUERY_US=500 LIVE_FAULTS_DEVICE=cuda $(WITH_GPUS) 8 \
	  python -m pytest -q -n 4 --dist worksteal tests/integration/test_live_faults.py tests/integration/test_healthy_jobs.py
ifndef CI
	STAND_IN_CONNECT=every LIVE_FAULTS_DEVICE=cuda $(WITH_GPUS) 8 \
	  python -m pytest -q -n 3 --dist worksteal tests/integration/test_live_faults.py
endif

stand-in-environment: $(STAND_IN)/installed

$(STAND_IN)/installed: pyproject.toml tests/stand_in/oldest.txt
	$(PYTHON) -m venv $(STAND_IN)
	$(STAND_IN)/bin/python -m pip install --quiet "torch===2.13.0" --config-settings editable_mode=compat -e ".[tools]" \
	  -c tests/stand_in/oldest.txt pytest pytest-xdist pytest-timeout pytest-testmon pytest-cov
	@touch $@

# What a machine with torch and pytest lacks, for its Python and no other: make gpu-wheels GPU_PYTHON=3.12
GPU_PYTHON ?= 3.12
gpu-wheels: $(STAMP)
	rm -rf .gpu-wheels
	$(BIN)/python -m pip download --quiet --only-binary=:all: --no-deps --dest .gpu-wheels --python-version $(GPU_PYTHON) \
	  --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	  --requirement tests/gpu/wheels.txt

# The compiled recorder under AddressSanitizer, UBSan and ThreadSanitizer: two ranks for about 13 minutes on two cores.
sanitize: $(STAMP)
	$(BIN)/python -m tests.sanitize

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.prose

# The pages in site/; every link and every name in them has to be there.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open $(CURDIR)/site/index.html"

# Samples mutations of the offline code; says which of them no unit test notices.
mutate: $(STAMP)
	$(BIN)/python -m tests.mutation

bench: $(STAMP)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/linking.py
	$(BIN)/python benchmarks/converting.py
	$(BIN)/python benchmarks/diagnosis.py
	$(BIN)/python -m benchmarks.thousands_of_ranks
	$(BIN)/python benchmarks/replaying.py
	$(BIN)/python -m benchmarks.record_and_replay
	$(BIN)/python -m benchmarks.whole_steps
	$(BIN)/python -m benchmarks.growing
	$(BIN)/python benchmarks/timelines.py

# Makes the code of the Chakra format anew. See et_def.proto for why its compiler is held.
proto:
	rm -rf .proto-venv
	$(PYTHON) -m venv .proto-venv
	.proto-venv/bin/pip install --quiet "grpcio-tools==1.62.3" "setuptools<70"
	cd tools/graph/chakra && ../../../.proto-venv/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. et_def.proto
	rm -rf .proto-venv

clean:
	rm -rf $(VENV) site $(DEMO) $(DEMO)-chakra $(DEMO)-replay $(DEMO)-hang
