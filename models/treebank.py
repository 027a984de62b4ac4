"""Sentences of a small English-like grammar with their dependency trees, labelled as in Universal Dependencies.

Which word a phrase depends on has to be learned: of the prepositions, *of* and *from* follow a noun and belong to it,
while *on*, *with* and *at* belong to the verb however many nouns are between. Verbs differ in what they take.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from models.conllu import Sentence

WORDS = {
    kind: words.split()
    for kind, words in {
        "DET": "the a this every some no",
        "ADJ": "old small green heavy quiet clever cheap broken warm strange",
        "NOUN": "dog teacher letter river engine book garden king window song train child market doctor bridge cat",
        "PROPN": "Anna Boris Chen Dora Emil",
        "PRON": "she he it they we",
        "intransitive": "sleeps waits laughs falls sings",
        "transitive": "sees builds reads likes follows carries sells",
        "reporting": "says thinks knows hopes",
        "ADV": "often never slowly here today",
        "of a noun": "of from",
        "of a verb": "on with at",
    }.items()
}


@dataclass
class Phrase:
    """A word with the phrases that depend on it, before and behind it, each with its label."""

    form: str
    tag: str
    left: list[tuple[str, Phrase]] = field(default_factory=list)
    right: list[tuple[str, Phrase]] = field(default_factory=list)

    def sentence(self) -> Sentence:
        """The words in order, with this one as the root of their tree."""
        order: list[tuple[Phrase, Phrase | None, str]] = []

        def visit(phrase: Phrase, head: Phrase | None, label: str) -> None:
            for inner, dependent in phrase.left:
                visit(dependent, phrase, inner)
            order.append((phrase, head, label))
            for inner, dependent in phrase.right:
                visit(dependent, phrase, inner)

        visit(self, None, "root")
        number = {id(phrase): k for k, (phrase, _, _) in enumerate(order, start=1)}
        return Sentence(
            [phrase.form for phrase, _, _ in order],
            [phrase.tag for phrase, _, _ in order],
            [0 if head is None else number[id(head)] for _, head, _ in order],
            [label for _, _, label in order],
        )


class Grammar:
    """Draws phrases; the deeper they lie, the simpler they are."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def word(self, kind: str, tag: str | None = None) -> Phrase:
        """A word of a kind, which is its tag too unless one is given."""
        return Phrase(str(self.random.choice(WORDS[kind])), tag or kind)

    def chance(self, probability: float) -> bool:
        return bool(self.random.random() < probability)

    def nominal(self, depth: int) -> Phrase:
        """A pronoun, a name, or a noun with all that can go with it."""
        if self.chance(0.3):
            return self.word("PRON" if self.chance(0.5) else "PROPN")
        noun = self.word("NOUN")
        if self.chance(0.8):
            noun.left.append(("det", self.word("DET")))
        while self.chance(0.3):
            noun.left.append(("amod", self.word("ADJ")))
        if depth < 3 and self.chance(0.25):
            noun.right.append(("nmod", self.prepositional("of a noun", depth + 1)))
        if depth < 2 and self.chance(0.15):
            other = self.nominal(depth + 2)
            other.left.insert(0, ("cc", Phrase("and", "CCONJ")))
            noun.right.append(("conj", other))
        return noun

    def prepositional(self, kind: str, depth: int) -> Phrase:
        nominal = self.nominal(depth)
        nominal.left.insert(0, ("case", self.word(kind, "ADP")))
        return nominal

    def clause(self, depth: int) -> Phrase:
        """A verb with its subject, and what the verb takes."""
        kind = str(self.random.choice(["intransitive", "transitive", "transitive", "reporting"]))
        if depth > 1 and kind == "reporting":
            kind = "transitive"
        verb = self.word(kind, "VERB")
        verb.left.append(("nsubj", self.nominal(depth)))
        if self.chance(0.2):
            verb.left.append(("advmod", self.word("ADV")))
        if kind == "transitive":
            verb.right.append(("obj", self.nominal(depth)))
        if kind == "reporting":
            inner = self.clause(depth + 1)
            inner.left.insert(0, ("mark", Phrase("that", "SCONJ")))
            verb.right.append(("ccomp", inner))
        elif self.chance(0.4):
            verb.right.append(("obl", self.prepositional("of a verb", depth + 1)))
        return verb


def generated_treebank(count: int, seed: int = 0) -> list[Sentence]:
    """Sentences with their trees, all projective; equal seeds give equal ones, and a larger count continues them."""
    grammar = Grammar(seed)
    sentences = []
    for _ in range(count):
        clause = grammar.clause(0)
        clause.right.append(("punct", Phrase(".", "PUNCT")))
        sentences.append(clause.sentence())
    return sentences
