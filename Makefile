# The two commands of the README are `make demo` and `make test`; the rest are their parts.
.DEFAULT_GOAL := help
PY := .venv/bin/python
PLAY := .venv/bin/ansible-playbook
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help setup lab-up lab-down lab-status demo test lint unit test-faults test-servers test-upgrade docs bench bench-servers bench-allocation build

help:  ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

setup:  ## the virtual environment and what else this machine lacks
	@.ci/setup

lab-up: setup  ## a real Kubernetes cluster with simulated GPUs on this machine
	@$(PY) -m lab up

lab-down: setup  ## take the lab away, with all that it started
	@$(PY) -m lab down

lab-status: setup  ## what of the lab is there
	@$(PY) -m lab status

demo: lab-up  ## lab, site.yml, acceptance.yml, inspect.yml
	@$(PLAY) playbooks/site.yml
	@$(PLAY) playbooks/acceptance.yml
	@$(PLAY) lab/demo.yml
	@$(PLAY) playbooks/inspect.yml
	@cat lab/next.txt

test: setup  ## everything: lint, unit tests, the lab end to end, molecule; replaces a lab that is up, and takes it down
	@$(PY) tests/run.py

lint unit: setup  ## one part of the tests
	@$(PY) tests/run.py $@

test-faults: lab-up  ## what takes minutes (timeouts, kills at every step, another driver and back); needs a lab that nothing has touched
	@$(PY) -m pytest $(sort $(wildcard tests/lab/test_[12]0_*.py) $(shell grep -l 'mark\.long' tests/lab/test_*.py)) -v -p no:cacheprovider

test-servers: setup  ## 10,000 pods against double booking, and the image by the real tools; after make lab-up, which leaves what they need
	@KUBEGPU_LONG=1 KUBEGPU_IMAGE_BUILD=1 $(PY) -m pytest tests/unit/servers/extender/test_double_booking.py tests/unit/runtime/test_image_build_real.py -v -s -p no:cacheprovider

test-upgrade: setup  ## kubeadm upgrade keeps the change; builds another Kubernetes, brings up a lab of its own; not part of `make test`
	@$(PY) -m pytest tests/upgrade -v -s -p no:cacheprovider

docs: setup  ## write docs/ anew from the modules and roles
	@$(PY) docs/generate.py

bench: setup  ## what a run with nothing to do costs (the lab must be up, after make demo)
	@$(PY) bench/noop.py

bench-servers: setup  ## extender and device plugin under load, some 15 minutes; needs the machine for itself
	@for each in device_plugin extender_filter extender_large scheduling; do $(PY) bench/$$each.py || exit 1; done

bench-allocation: setup  ## gpu_allocation_info beside a plain list, on a real API server with 20,000 pods
	@$(PY) bench/allocation.py

build: setup  ## the collection's tarball
	@.venv/bin/ansible-galaxy collection build --force
