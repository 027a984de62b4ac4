"""CoNLL-U: what is read, what is written back, and what is wrong with a file."""

from __future__ import annotations

import re

import pytest

from dynbatch.errors import FileFormatError
from models.conllu import check_tree, read_conllu, written
from models.treebank import generated_treebank

TEXT = """\
# sent_id = 1
# text = Today's don't
1-2	Today's	_	_	_	_	_	_	_	SpaceAfter=No
1	Today	today	NOUN	NN	Number=Sing	4	obl:tmod	4:obl	_
2	's	's	PART	POS	_	1	case	_	_
3-4	don't	_	_	_	_	_	_	_	_
3	do	do	AUX	VBP	_	4	aux	_	_
4	n't	not	PART	RB	_	0	root	_	_
4.1	go	go	VERB	VB	_	_	_	0:root	CopyOf=-1

1	No	no	DET	DT	_	_	_	_	_
2	heads	head	NOUN	NNS	_	_	dep	_	_

"""


def row(*columns):
    """A line of ten columns, the last ones ``_``."""
    return "\t".join([*map(str, columns), *"_" * (10 - len(columns))])


def word(number, head):
    return row(number, "w", "_", "X", "_", "_", head, "dep")


def read(tmp_path, text, newline="\n"):
    path = tmp_path / "x.conllu"
    path.write_bytes(text.replace("\n", newline).encode())
    return read_conllu(path)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff", "\n\n"])
def test_everything_comes_back(tmp_path, start, newline):
    sentences = read(tmp_path, start + TEXT, newline)
    assert "".join(f"{line}\n" for line in written(sentences)) == TEXT
    first, second = sentences
    assert first.forms == ("Today", "'s", "do", "n't") and first.tags == ("NOUN", "PART", "AUX", "PART")
    assert first.heads == (4, 1, 4, 0) and first.labels == ("obl:tmod", "case", "aux", "root")
    assert second.heads == (None, None) and second.labels == (None, "dep")
    check_tree(first)


def test_the_last_empty_line_may_be_missing(tmp_path):
    assert [str(s) for s in read(tmp_path, TEXT.rstrip("\n"))] == TEXT.rstrip("\n").split("\n\n")


def test_another_tree_changes_the_words_columns_only(tmp_path):
    first, second = read(tmp_path, TEXT)
    lines = str(first.with_tree([0, 1, 2, 3], ["root", "a", "b", "c"])).split("\n")
    before = TEXT.split("\n")
    assert [k for k, line in enumerate(lines) if line != before[k]] == [3, 4, 6, 7]
    assert lines[6] == "3\tdo\tdo\tAUX\tVBP\t_\t2\tb\t_\t_"
    assert str(second.with_tree([2, 0], ["a", None])).endswith("\t0\t_\t_\t_")


def test_a_generated_sentence_is_written_and_read(tmp_path):
    sentences = generated_treebank(20)
    again = read(tmp_path, "".join(f"{line}\n" for line in written(sentences)))
    for a, b in zip(sentences, again, strict=True):
        assert (a.forms, a.tags, a.heads, a.labels) == (b.forms, b.tags, b.heads, b.labels)
        check_tree(b)
    assert [str(s) for s in generated_treebank(30)[:20]] == [str(s) for s in sentences]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "no sentence"),
        ("1\tone\ttwo\n", 1, "expected 10 columns with tabs between them, not 3"),
        (f"# x\n{word(1, 0)}\n\n{word(1, 0).replace(chr(9), ' ')}\n", 4, "10 columns"),
        (f"{word(1, 0)}\n{word(3, 1)}\n", 2, "the ID '3' is out of order: word 2 comes next"),
        (f"{word('one', 0)}\n", 1, "the ID 'one' is not a number"),
        (f"{word(1, 0)}\n{row('3-4', 'w')}\n", 2, "the ID '3-4' is out of order"),
        (f"{word(1, 0)}\n{row('2-1', 'w')}\n", 2, "the ID '2-1' is out of order"),
        (f"{word(1, 0)}\n{row('2.1', 'w')}\n", 2, "the ID '2.1' is out of order"),
        (f"{word(1, 0)}\n{word(2, 3)}\n", 2, "the HEAD '3' is neither _ nor a word's number, 0 to 2"),
        (f"{word(1, 'x')}\n", 1, "the HEAD 'x'"),
        (f"{word(1, -1)}\n", 1, "the HEAD '-1'"),
        (f"{word(1, 2)}\n{word(2, 2)}\n", 2, "word 2 is its own head"),
        (f"{word(1, 0)}\n\n# a comment\n\n", 3, "a sentence without words"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, text, line, message):
    with pytest.raises(FileFormatError, match=re.escape(message)) as caught:
        read(tmp_path, text)
    assert f"x.conllu, line {line}: " in str(caught.value)


def test_other_encodings_are_named_with_the_line(tmp_path):
    path = tmp_path / "x.conllu"
    path.write_bytes(word(1, 0).encode() + b"\n\n# \xff\n")
    with pytest.raises(FileFormatError, match=r"x.conllu, line 3: this is not UTF-8"):
        read_conllu(path)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([2, 1, 0], "the heads of words 1, 2 form a cycle"),
        ([0, 3, 4, 2], "the heads of words 2, 3, 4 form a cycle"),
        ([0, 1, 0], "expected one word with head 0, not 2"),
        ([2, 3, 1], "expected one word with head 0, not 0"),
        ([2, 0, "_"], "word 3 has no head"),
    ],
)
def test_what_is_not_a_tree_is_named_with_its_sentence(tmp_path, heads, message):
    lines = [word(number, head) for number, head in enumerate(heads, start=1)]
    sentence = read(tmp_path, "\n".join([word(1, 0), "", "# x", *lines, ""]))[1]
    with pytest.raises(FileFormatError) as caught:
        check_tree(sentence)
    assert str(caught.value).endswith(f"x.conllu, line 3: {message}")


def test_a_label_is_part_of_a_tree(tmp_path):
    (sentence,) = read(tmp_path, row(1, "w", "_", "X", "_", "_", 0))
    with pytest.raises(FileFormatError, match="word 1 has no label"):
        check_tree(sentence)
