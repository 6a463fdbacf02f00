# make chat    set up and chat; MODEL=file.gguf, BACKEND=CPU|CUDA|NV, ARGS="more options of orin-chat"
# make test    set up and run the tests; ARGS="options of pytest"
# make check   everything that continuous integration checks
# make clean   remove what these made
.PHONY: chat test check clean
.DELETE_ON_ERROR:
BACKEND ?= auto
PYTHON = .venv/bin/python
NOISE = build/noise.gguf

ifdef MODEL
chat:
	@BACKEND=$(BACKEND) .ci/setup
else
chat: $(NOISE)
	@echo "No MODEL was given: this is a small generated model, and what it says is noise."
	@echo "For real answers: make chat MODEL=path/to/model.gguf"
endif
	@$(PYTHON) -m app --model "$(or $(MODEL),$(NOISE))" --backend $(BACKEND) $(ARGS)

# What writes it is among the tools of the tests.
.PHONY: noise-tools
noise-tools:
	@BACKEND=$(BACKEND) .ci/setup dev

$(NOISE): tests/generated_model.py | noise-tools
	@$(PYTHON) tests/generated_model.py $@

# The tests run on the CPU backend.
test:
	@BACKEND=CPU .ci/setup dev
	@$(PYTHON) -m pytest $(ARGS)

check:
	@.ci/run

clean:
	rm -rf .venv build dist *.egg-info
