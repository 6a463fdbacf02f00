from engine.cache import sources


def test_sources_are_all_that_lies_below_a_folder(tmp_path):
    for name, text in (("b.py", "1"), ("a/c.py", "2"), ("a/d.txt", "3"), ("a/e/f.py", "4")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    names = [str(tmp_path / name) for name in ("a/c.py", "a/e/f.py", "b.py")]
    assert list(sources._sources(str(tmp_path))) == names
    assert len({sources._file_digest(name) for name in names}) == 3
    assert len({sources.source_digest(*folders) for folders in ((), ("kernels",), ("formats",))}) == 3
