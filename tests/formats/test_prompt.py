from engine.formats.gguf import GGUF
from engine.formats.prompt import PromptEncoder
from tests.generated_model import write


def test_a_template_that_does_not_work_is_told_before_the_first_prompt(tmp_path):
    for source, says in ((None, []), ("{% if %}", ["does not work"]), ("{{ 1 / 0 }}", ["does not work"])):
        with GGUF(write(tmp_path / "m.gguf", template=source)) as file:
            warnings = PromptEncoder(file).warnings
        assert [words in warning for words, warning in zip(says, warnings, strict=True)] == [True] * len(says)
