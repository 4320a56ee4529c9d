# The two commands of the README are `make demo` and `make test`; the rest are their parts.
.DEFAULT_GOAL := help
PY := .venv/bin/python
PLAY := .venv/bin/ansible-playbook
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help setup lab-up lab-down lab-status demo test lint unit test-faults test-upgrade docs bench build

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
	@$(PY) -m pytest tests/lab/test_10* tests/lab/test_20* tests/lab/test_25* tests/lab/test_35* tests/lab/test_45* -v -p no:cacheprovider

test-upgrade: setup  ## kubeadm upgrade keeps the change; builds another Kubernetes, brings up a lab of its own; not part of `make test`
	@$(PY) -m pytest tests/upgrade -v -s -p no:cacheprovider

docs: setup  ## write docs/ anew from the modules and roles
	@$(PY) docs/generate.py

bench: setup  ## what a run with nothing to do costs (the lab must be up, after make demo)
	@$(PY) bench/noop.py

build: setup  ## the collection's tarball
	@.venv/bin/ansible-galaxy collection build --force
