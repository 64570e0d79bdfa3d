# make demo    an echo over a real RDMA device: this machine's, or the lab's
# make test    before each commit: style, types, unit tests, the lab, two machines, then a device
# make test-all  before a release: the same, with each device test on every loop and every device
# make check   what needs no device: style, types, documentation, unit tests
# make coverage  what unit tests and SEEDS=400 simulated programs execute of Python and C
# make docs    build the documentation site in build/site
# make soak    the long campaigns: SEEDS=10000 simulated programs, faults between two machines
#              (make network-campaign), then those on a device
# make sanitize  before a release: unit tests and SEEDS=1000 simulated programs with ASan and UBSan,
#              then threads that post and destroy with TSan
# make mutation  change the stream protocol and the tables of states; print what no test notices
# make dask-checks  the checks of distributed for backends, with rdma://; DISTRIBUTED=PATH: of this
#              checkout
# make bench   aiordma beside perftest, pyverbs, rsockets and TCP; BENCH="...": its options
# make count   instructions of a message, counted by callgrind; COUNT="...": its options
# make matrix  test the commands above, and the wheel, on fresh Debian systems and other Pythons
# make wheel   build dist/*.whl and dist/*.tar.gz, and test them
# make setup   only install what the others need; they do it themselves
# make clean   remove the virtual environment and everything built

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
LAB_READY := $(VENV)/.lab-ready

PACKAGES := gcc git libc6-dev python3 python3-dev python3-venv librdmacm-dev libibverbs-dev \
	ibverbs-providers rdmacm-utils iproute2 perftest python3-pyverbs valgrind
NATIVE := $(addprefix aiordma/_native/,build.py cdef.h helpers.h libraries.c cm_events.c devices.c work_requests.c \
	addresses.c id_calls.c buffer_exporter.c) \
	$(wildcard aiordma/_native/fast_path/*)
C_FILES := $(filter-out %/cdef.h %/_lib.c,$(wildcard $(addprefix aiordma/_native/,*.c *.h fast_path/*.c fast_path/*.h) tests/simulator/*.[ch] tests/interop/*.c))
UNIT_TESTS := -p simulated tests/unit tests/device
DEVICE_TESTS := tests/device tests/faults tests/interop
DEVICE_OPTIONS := -p progress -p warm_start -m 'not campaign'

# Compiling everything anew takes each Python in the lab half a minute.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: demo test test-all check lint docs unit coverage lab-test network-test network-campaign long-run device-test soak mutation sanitize asan tsan dask-checks bench count matrix wheel setup clean

demo: setup
	@$(call on_device,rxe,$(PY) examples/demo.py)

# One after the other, so that pytest's closing line for the device tests is the last.
test: setup
	@$(MAKE) --no-print-directory check
	@$(MAKE) --no-print-directory lab-test
	@$(MAKE) --no-print-directory network-test
	@$(MAKE) --no-print-directory device-test

test-all:
	@$(MAKE) --no-print-directory test UNIT_OPTIONS=--all-combinations \
		DEVICE_OPTIONS="-p progress -m 'not campaign' --all-combinations"

# The documentation is built beside the checks of style and types: each uses one processor.
check: $(READY)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint docs
	@$(MAKE) --no-print-directory unit

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(C_FILES)
	$(PY) -m benchmarks.lint_prose
	$(VENV)/bin/mypy

docs: $(READY)
	$(VENV)/bin/sphinx-build --nitpicky --fail-on-warning --keep-going --quiet docs build/site

unit: $(READY)
	$(PY) -m pytest -p progress -n 2 --dist worksteal $(UNIT_OPTIONS) $(UNIT_TESTS)

# In a copy of the tree, whose C modules are built to count. Programs run in one process: a forked
# one would lose what it has counted. Measuring would change the number of instructions.
COPY = $(CURDIR)/build/$@
IN_COPY = cd $(COPY) && PYTHONPATH=$(COPY):$(COPY)/tests $(CURDIR)/$(PY)
coverage: SEEDS := 400
coverage: $(READY)
	@$(PY) -m pip install --quiet --group coverage
	@export CFLAGS='-O0 --coverage -fprofile-update=atomic' && $(build_copy)
	@$(IN_COPY) -m coverage run -m simulator.campaign --no-fork 0 $(SEEDS)
	@$(IN_COPY) -m coverage run -m pytest -p progress -n 2 --dist worksteal $(UNIT_TESTS) \
		--ignore tests/unit/test_campaign.py --ignore tests/unit/test_instruction_counts.py
	@$(IN_COPY) -m coverage combine --quiet
	@$(IN_COPY) -m coverage json --quiet
	@$(IN_COPY) -m coverage report --show-missing --skip-covered >$(COPY)/missing.txt
	@$(IN_COPY) -m gcovr --json-summary gcovr.json --txt >>$(COPY)/missing.txt
	@$(IN_COPY) -m benchmarks.coverage_table || \
		{ echo "build/coverage/missing.txt lists what is missing"; exit 1; }

define build_copy
rm -rf $(COPY) && mkdir -p $(COPY) && \
tar --create --exclude-vcs --exclude=./build --exclude=./$(VENV) --exclude='*.so' . \
	| tar --extract --directory $(COPY) && \
$(IN_COPY) setup.py --quiet build_ext --inplace
endef

mutation: $(READY)
	@$(PY) -m pip install --quiet --group mutation
	@$(build_copy)
	@cd $(COPY) && $(CURDIR)/$(VENV)/bin/mutmut run --max-children 2
	@cd $(COPY) && $(CURDIR)/$(VENV)/bin/mutmut results | tee survivors.txt && ! test -s survivors.txt
	@$(PY) -m benchmarks.mutation

sanitize: $(READY)
	@$(MAKE) --no-print-directory asan
	@$(MAKE) --no-print-directory tsan

# The simulated device is built with the sanitizer, too: it uses the memory that requests name.
# Left out: what valgrind counts (it cannot run ASan), and a list of the libraries that are linked.
asan: export CFLAGS := -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover
asan: SEEDS := 1000
asan:
	@$(build_copy)
	@$(call sanitized,-m pytest -p progress -n 2 --dist worksteal $(UNIT_TESTS) tests/sanitizers \
		--ignore tests/unit/test_campaign.py --ignore tests/unit/test_instruction_counts.py \
		--deselect tests/unit/test_native.py::test_the_extensions_are_linked_with_libc_only)
	@$(call sanitized,-m simulator.campaign 0 $(SEEDS))

# The interpreter is not built with TSan. TSan sees its locks, and so the order that they make.
tsan: export CFLAGS := -g -fno-omit-frame-pointer -fsanitize=thread
tsan:
	@$(build_copy)
	@$(call sanitized,-m pytest tests/sanitizers tests/unit/test_posting.py)

# $(call sanitized,ARGUMENTS): run Python in a copy. Print and fail on the reports of all processes.
# Addresses are not random, because the runtime of gcc 12 needs some for itself. libstdc++ is loaded
# before the runtime looks for its functions. Each object of Python is an allocation of its own.
# LeakSanitizer does not see the variables of running functions: it would report them as lost.
define sanitized
options=log_path=$(COPY)/report:print_stacktrace=1:detect_leaks=0:die_after_fork=0; \
export ASAN_OPTIONS=$$options UBSAN_OPTIONS=$$options TSAN_OPTIONS=$$options; \
export AIORDMA_SANITIZER=$@ PYTHONMALLOC=malloc; \
preloaded="$$(gcc -print-file-name=lib$@.so) $$(gcc -print-file-name=libstdc++.so.6)"; \
(cd $(COPY) && PYTHONPATH=$(COPY):$(COPY)/tests LD_PRELOAD=$$preloaded \
	setarch --addr-no-randomize $(CURDIR)/$(PY) $(1)); status=$$?; \
! tail --lines=+1 $(COPY)/report.* 2>/dev/null && exit $$status
endef

# Each test boots a machine.
lab-test: setup
	$(PY) -m pytest -n 2 --dist loadgroup tests/lab

# Between two machines, also if this machine has a device.
network-test: setup
	$(call between_two,both,-m 'not campaign')

network-campaign: setup
	$(call between_two,rxe,-rP)
	$(call between_two,siw,-rP)

# LONG="traffic|connections|cancels [--seconds S] [--count N] [--seed SEED]"
LONG := traffic
long-run: setup
	$(PY) -m aiordma lab run --nodes 2 --device both -- $(PY) tests/network/long_run.py $(LONG)

between_two = $(PY) -m aiordma lab run --nodes 2 --device $(1) -- $(PY) -m pytest $(2) tests/network

# On a machine without a device, two labs share the tests. They find the tests compiled already.
device-test: setup
	@if $(PY) -m aiordma devices >/dev/null 2>&1; then \
		echo "aiordma: on this machine's RDMA device"; $(PY) -m pytest $(DEVICE_OPTIONS) $(DEVICE_TESTS); \
	else \
		echo "aiordma: no RDMA device here: booting two labs"; \
		$(PY) -m pytest --collect-only --quiet $(DEVICE_TESTS) >/dev/null; \
		$(PY) -m pytest $(DEVICE_OPTIONS) --dist worksteal \
			--tx '2*popen//python=$(PY) -m aiordma lab run --device both -- $(PY)' $(DEVICE_TESTS); \
	fi

SEEDS := 10000
soak: setup
	@PYTHONPATH=tests $(PY) -m simulator.campaign 0 $(SEEDS)
	@$(MAKE) --no-print-directory network-campaign
	@$(call on_device,both,$(PY) -m pytest tests/interop -m campaign)
	@$(call on_device,both,$(PY) -m pytest tests/soak)

# The packages of distributed leave out its tests: fetch those of the installed version.
DISTRIBUTED := build/distributed
dask-checks: setup
	@test -d $(DISTRIBUTED) || git clone --quiet --depth 1 \
		--branch "$$($(PY) -c 'import distributed; print(distributed.__version__)')" \
		https://github.com/dask/distributed $(DISTRIBUTED)
	@$(call on_device,both,$(PY) tests/dask_checks.py $(DISTRIBUTED))

bench: setup
	@$(call on_device,rxe --awake,$(PY) -m aiordma bench $(BENCH))

# MATRIX="...": rows, such as sid, 3.12, 3.13t or the path of an interpreter. Needs root.
matrix: wheel
	@$(call install_packages,debootstrap)
	@$(PY) -m benchmarks.matrix $(MATRIX)

# The wheel is built from the source archive, in an environment of its own.
wheel: $(READY)
	@$(PY) -m pip install --quiet --group wheel
	@rm -rf dist build/wheel
	$(PY) -m build --outdir build/wheel
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m auditwheel repair --wheel-dir dist build/wheel/*.whl
	@cp build/wheel/*.tar.gz dist
	$(VENV)/bin/abi3audit --strict --report dist/*.whl
	$(PY) -m pytest tests/packaging

count: $(READY)
	@$(PY) -m benchmarks.instructions $(COUNT)

setup: $(READY) $(LAB_READY)

# $(call on_device,DEVICE,COMMAND): run COMMAND here if this machine has an RDMA device with an
# address, else in a lab that has DEVICE. Further options of the lab can follow DEVICE.
define on_device
if $(PY) -m aiordma devices >/dev/null 2>&1; then \
	echo "aiordma: on this machine's RDMA device"; $(2); \
else \
	echo "aiordma: no RDMA device here: booting the lab"; \
	$(PY) -m aiordma lab run --device $(1) -- $(2); \
fi
endef

$(READY): pyproject.toml setup.py $(NATIVE)
	@$(call install_packages,$(PACKAGES))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "aiordma: $(PYTHON) is older than 3.11; try: make PYTHON=/usr/bin/python3" >&2; exit 1; }
	@echo "aiordma: making the virtual environment $(VENV) and building the extension"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@{ $(PY) -m pip install --upgrade pip && $(PY) -m pip install --config-settings editable_mode=compat --editable '.[dev]'; } \
		>$(VENV)/install.log 2>&1 || { cat $(VENV)/install.log >&2; exit 1; }
	@touch $@

# A machine with a device of its own needs no lab, until somebody asks for one.
$(LAB_READY): $(READY)
	@$(PY) -m aiordma lab setup
	@touch $@

# $(call install_packages,PACKAGES): install those of Debian's packages that are missing.
define install_packages
missing=; \
for package in $(1); do \
	dpkg-query --show --showformat='$${db:Status-Status}\n' $$package 2>/dev/null \
		| grep --quiet --line-regexp installed || missing="$$missing $$package"; \
done; \
if [ -n "$$missing" ]; then \
	if ! command -v apt-get >/dev/null; then \
		echo "aiordma: this is no Debian; install the counterparts of:$$missing" >&2; exit 1; \
	fi; \
	echo "aiordma: installing Debian packages:$$missing"; \
	as_root=; [ "$$(id -u)" = 0 ] || as_root=sudo; \
	$$as_root apt-get update --quiet=2 && \
	$$as_root env DEBIAN_FRONTEND=noninteractive \
		apt-get install --yes --quiet --no-install-recommends $$missing; \
fi
endef

clean:
	rm -rf $(VENV) build dist *.egg-info aiordma/_native/_*.so aiordma/_native/_lib.c
