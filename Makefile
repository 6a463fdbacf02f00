# make chat    set up and chat; MODEL=file.gguf, BACKEND=CPU|CUDA|NV, ARGS="more options of orin-chat"
# make test    set up and run the tests; ARGS="options of pytest"
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

$(NOISE): tests/generated_model.py | dev
	@$(PYTHON) tests/generated_model.py $@

test: dev
	@$(PYTHON) -m pytest $(ARGS)

.PHONY: dev
dev:
	@.ci/setup dev

check:
	@.ci/run

clean:
	rm -rf .venv build dist *.egg-info
