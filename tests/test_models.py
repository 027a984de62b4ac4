"""The models beside the TreeLSTM: that they learn, compute their papers' equations, and batch as they say they do."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import dynbatch as dy
from dynbatch.errors import FileFormatError
from models import training
from models.birnn import Tagger
from models.documents import TOPICS, generate, read_documents
from models.mvrnn import NOISE, PhraseClassifier
from models.nestedrnn import DocumentClassifier
from models.sentences import MARKERS, Sentence, marked_sentences, read_sentences
from models.trees import Tree, listops
from tests.model_runs import command, gradients, new_task

TASKS = {
    "mvrnn": (PhraseClassifier, listops(12, seed=2)),
    "birnn": (Tagger, marked_sentences(12, seed=2)),
    "nestedrnn": (DocumentClassifier, generate(12, 3, 6, seed=2)),
}
LEARNED = {  # flags, and what dev_accuracy they reach; what guessing the commonest class reaches
    "mvrnn": (["--hidden", 32, "--epochs", 3, "--limit", 2000, "--batch-size", 32], 0.5, 0.2),
    "birnn": (["--hidden", 16, "--epochs", 2, "--limit", 1000, "--batch-size", 16], 0.95, 0.3),
    "nestedrnn": (["--hidden", 16, "--epochs", 3, "--limit", 800, "--batch-size", 16, "--steps", 3, 6], 0.8, 0.35),
}
GENERATED = {
    "mvrnn": lambda: listops(500),
    "birnn": lambda: marked_sentences(500),
    "nestedrnn": lambda: generate(500, 3, 6),
}


@pytest.fixture(params=TASKS)
def model(request):
    return request.param


@pytest.fixture(scope="module", params=TASKS)
def trained(request, tmp_path_factory):
    """Name, folder with the saved model, and report of a model that was trained on generated data."""
    name, folder = request.param, tmp_path_factory.mktemp("trained")
    command(name, *LEARNED[name][0], "--save", folder / "model", "--json", folder / "report.json")
    return name, folder, json.loads((folder / "report.json").read_text())


def test_learns_far_above_chance(trained):
    name, _, report = trained
    _, reached, chance = LEARNED[name]
    assert report["dev_accuracy"] > reached > 2 * chance
    labels = [
        label for instance in GENERATED[name]() for label in (instance.tags if name == "birnn" else [instance.label])
    ]
    assert max(labels.count(label) for label in set(labels)) < chance * len(labels)
    assert 1 < report["batches"] < report["nodes"] / 10


def test_evaluates_and_predicts_from_a_saved_model(trained, tmp_path):
    name, folder, report = trained
    command(name, "--load", folder / "model", "--evaluate", "--json", tmp_path / "evaluated.json")
    evaluated = json.loads((tmp_path / "evaluated.json").read_text())
    assert evaluated["dev_accuracy"] == report["dev_accuracy_per_epoch"][-1]
    text, expected = {
        "mvrnn": ("(? MAX (? 2))\n(? 7)\n", "[0-9]\n[0-9]\n"),
        "birnn": ("w1 < never|seen > |\n", "w1[|]-< <[|]-> never[|]<> >[|]<- [|][|]>-\n"),
        "nestedrnn": ("? t1 w1 | never seen t1\n? t1 | t2 w3 w2 | t2 w1\n", "1\n2\n"),
    }[name]
    (tmp_path / "new.txt").write_text(text)
    assert re.fullmatch(expected, command(name, "--load", folder / "model", "--predict", tmp_path / "new.txt").stdout)


def test_instances_of_like_length_are_predicted_together_and_stay_in_order():
    class Counter(training.Task):
        unit = "lists"

        def __init__(self):
            self.seen = []

        def length(self, instance):
            return len(instance)

        def predict(self, instances):
            self.seen.append([len(x) for x in instances])
            return [sum(x) for x in instances]

    task, lists = Counter(), [[n] * (n * 7 % 10) for n in range(10)]
    predictions, total = training.predict(task, lists, 4, "count")
    assert predictions == [sum(x) for x in lists]
    assert task.seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert total.instances == 10 and total.first[0] == 4


def test_rates_leave_the_first_minibatch_out():
    total = training.Throughput()
    total.add(10, 1.0, None, 5.0)
    assert total.report("words")["words_per_s"] == 2.0
    total.add(20, 1.0, None, 2.0)
    total.add(20, 1.0, None, 2.0)
    assert total.report("words")["words_per_s"] == 10.0


def test_strategies_agree(model, float64):
    task_class, instances = TASKS[model]
    task = new_task(task_class, "--hidden", "8", instances=instances)
    found = {}
    for strategy in ("off", "depth", "agenda"):
        with dy.autobatch(strategy):
            dy.renew_cg()
            loss = task.batch_loss(instances)
            value, batches = loss.value(), dy.plan().batches
            loss.backward()
        found[strategy] = value, gradients(task), batches
        task.collection.reset_gradient()
    for value, grads, batches in (found["depth"], found["agenda"]):
        assert value == pytest.approx(found["off"][0], rel=1e-12)
        assert batches < found["off"][2] / 5
        for grad, expected in zip(grads, found["off"][1], strict=True):
            np.testing.assert_allclose(grad, expected, rtol=1e-9, atol=1e-12)


def test_a_minibatch_equals_its_instances_one_by_one(model, float64):
    task_class, instances = TASKS[model]
    task = new_task(task_class, "--hidden", "8", instances=instances)
    together = task.batch_loss(instances).value()
    apart = 0.0
    for instance in instances:
        dy.renew_cg()
        apart += task.loss(instance).value()
    assert together == pytest.approx(apart, rel=1e-12)


def test_the_matrix_vector_network_computes_the_papers_equations(float64):
    tree = Tree(1, children=[Tree(0, word="a"), Tree(1, children=[Tree(0, word="b"), Tree(1, word="c")])])
    task = new_task(PhraseClassifier, "--hidden", "5", instances=[tree])
    encoder = task.encoder
    rows = [task.word_ids[word] for word in "abc"]
    (a, A), (b, B), (c, C) = [(encoder.vectors.as_array()[k], encoder.matrices.as_array()[k]) for k in rows]
    W, W_M = encoder.W.as_array(), encoder.W_M.as_array()

    def p(a, A, b, B):
        return np.tanh(W @ np.concatenate([B @ a, A @ b]))

    phrase, P = p(b, B, c, C), W_M @ np.concatenate([B, C])
    np.testing.assert_allclose(task.encode(tree)[-1].npvalue(), p(a, A, phrase, P), rtol=1e-12)


def test_matrices_start_near_the_identity_at_any_depth(float64):
    task = new_task(PhraseClassifier, "--hidden", "20", instances=TASKS["mvrnn"][1])
    matrix, other = task.encoder.matrices.as_array()[:2]
    assert np.abs(matrix - np.eye(20)).std() < 2 * NOISE
    composed = task.encoder.W_M.as_array() @ np.concatenate([matrix, other])
    assert np.abs(composed - np.eye(20)).max() < 10 * NOISE


def test_each_direction_of_the_tagger_has_read_up_to_the_word(float64):
    task = new_task(Tagger, "--hidden", "5", instances=TASKS["birnn"][1])

    def outputs(words):
        return [(h_f.npvalue(), h_b.npvalue()) for h_f, h_b in task.encode(words)]

    whole, other = outputs([1, 2, 3, 4]), outputs([1, 2, 3, 5])
    for (h_f, h_b), (other_f, other_b) in zip(whole[:3], other):
        np.testing.assert_array_equal(h_f, other_f)
        assert np.abs(h_b - other_b).max() > 1e-3
    np.testing.assert_allclose([h_b for _, h_b in outputs([3, 4])], [h_b for _, h_b in whole[2:]], rtol=1e-12)


def test_the_nested_network_computes_its_equations(float64):
    def logistic(x):
        return 1 / (1 + np.exp(-x))

    task = new_task(DocumentClassifier, "--hidden", "5", instances=TASKS["nestedrnn"][1])
    encoder = task.encoder
    value = {name: p.as_array() for name, p in vars(encoder).items() if isinstance(p, dy.Parameter)}
    s = np.zeros(5)
    for sentence in ((1, 2, 3), (4,)):
        h = np.zeros(5)
        for word in sentence:
            h = np.tanh(value["W"] @ encoder.embeddings.as_array()[word] + value["U"] @ h + value["b"])
        z, r = (logistic(value[f"W_{k}"] @ h + value[f"U_{k}"] @ s + value[f"b_{k}"]) for k in "zr")
        s = (1 - z) * s + z * np.tanh(value["W_u"] @ h + value["U_u"] @ (r * s) + value["b_u"])
    np.testing.assert_allclose(encoder.encode(((1, 2, 3), (4,))).npvalue(), s, rtol=1e-12)


def test_tags_are_the_markers_around_a_word():
    for words, tags in marked_sentences(100, seed=4):
        for k, tag in enumerate(tags):
            before = [word for word in words[:k] if word in MARKERS]
            after = [word for word in words[k + 1 :] if word in MARKERS]
            assert tag == (before[-1] if before else "-") + (after[0] if after else "-")
    assert marked_sentences(20, seed=1) == marked_sentences(40, seed=1)[:20] != marked_sentences(20, seed=2)


def test_classes_are_the_topics_of_most_sentences():
    topics = [f"t{topic}" for topic in range(TOPICS)]
    for document in generate(100, 2, 5, seed=4):
        last = [[topics.index(word) for word in sentence if word in topics][-1] for sentence in document.sentences]
        assert all(last.count(document.label) > last.count(k) for k in range(TOPICS) if k != document.label)
        assert {2 <= len(part) <= 5 for part in (*document.sentences, document.sentences)} == {True}
    assert generate(20, 2, 5, seed=1) == generate(40, 2, 5, seed=1)[:20] != generate(20, 2, 5, seed=2)
    assert generate(3, 1, 1)


def test_tagged_sentences(tmp_path):
    path = tmp_path / "tagged.txt"
    path.write_text("\ufeffthe|O a|b|I-MISC\r\n\n8\xa01/2|O\n")
    assert read_sentences(path) == [Sentence(("the", "a|b"), ("O", "I-MISC")), Sentence(("8\xa01/2",), ("O",))]
    assert read_sentences(path, tags=False)[0] == Sentence(("the", "a|b"), (None, None))
    path.write_text("no tags |\n")
    assert read_sentences(path, tags=False) == [Sentence(("no", "tags", "|"), (None,) * 3)]


def test_documents(tmp_path):
    path = tmp_path / "documents.txt"
    path.write_text("1 to be | or not|to\n\n0 be\n")
    assert read_documents(path) == [((("to", "be"), ("or", "not|to")), 1), ((("be",),), 0)]
    assert [label for _, label in read_documents(path, labels=False)] == [None, None]


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (read_sentences, "a|O\na|O bare|\n", "line 2, column 5: expected word|tag, not 'bare|'"),
        (read_sentences, "a|O word\n", "line 1, column 5: expected word|tag, not 'word'"),
        (read_sentences, "|O\n", "line 1, column 1: expected word|tag, not '|O'"),
        (read_sentences, "\n \n", "no sentence in this file"),
        (read_sentences, b"a|O\nb\xff|O\n", "line 2, column 2: this is not UTF-8"),
        (read_documents, "one word\n", "line 1: the class 'one' is not an integer"),
        (read_documents, "1 word\n2\n", "line 2: sentence 1 has no words"),
        (read_documents, "1 word | | word\n", "line 1: sentence 2 has no words"),
        (read_documents, "1 word |\n", "line 1: sentence 2 has no words"),
        (read_documents, "", "no document in this file"),
        (read_documents, b"1 \xff\n", "line 1, column 3: this is not UTF-8"),
    ],
)
def test_malformed_files_are_refused_with_the_place(tmp_path, read, text, message):
    path = tmp_path / "broken.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FileFormatError) as caught:
        read(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


@pytest.mark.parametrize("model", ["birnn", "nestedrnn"])
def test_faults_in_flags_and_files_are_one_clear_line(model, tmp_path):
    broken = "word\n" if model == "birnn" else "1 |\n"
    (tmp_path / "train.txt").write_text(broken)
    done = command(model, "--data", tmp_path, status=1)
    assert "Traceback" not in done.stderr and "train.txt, line 1" in done.stderr.splitlines()[-1]
    done = command(model, "--data", tmp_path / "nowhere", status=1)
    assert "Traceback" not in done.stderr and "nowhere" in done.stderr.splitlines()[-1]


def test_a_folder_without_training_sentences(tmp_path):
    sentences = [" ".join(f"{word}|{tag}" for word, tag in zip(*found)) for found in marked_sentences(40)]
    (tmp_path / "dev.txt").write_text("\n".join(sentences))
    done = command("birnn", "--data", tmp_path, "--hidden", 4, "--epochs", 1)
    assert "36 sentences to train on, 4 for dev" in done.stdout
    (tmp_path / "dev.txt").write_text(sentences[0])
    assert "too few to train and to evaluate" in command("birnn", "--data", tmp_path, status=1).stderr
