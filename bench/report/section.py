"""A section of docs/benchmarks.md: words by people, figures from a result file."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from string import Formatter

from bench.report.results import ReportError, Result, number, table

Headline = tuple[str, str, str, bool]
"""What, wanted, measured, met: a row of the README's table."""

CAUSE_UNKNOWN = "not looked into"
WIDTH = 108


def _nothing(_: Result) -> list[Headline]:
    return []


def _no_words(_: Result) -> Mapping[str, bool]:
    return {}


@dataclass(frozen=True, slots=True)
class Section:
    """A section.

    Attributes:
        position: Sections stand in ascending order of it.
        title: Its heading.
        result: Its result file is ``bench/results/RESULT.json``.
        text: Markdown with places, ``{name}``. ``{targets}`` is what became of the targets.
        places: Returns what belongs into every other place.
        given: Figures that stand in the text as they are, and what each is: a setting of the
            benchmark or somebody else's number. All others must be places.
        reasons: Why targets were missed: a regular expression for names of verdicts, and the cause.
            The first that fits counts.
        words: Returns what the text says in words and whether the figures still bear it out; the
            words must be in the text.
        headlines: Returns what the README shows of it.
    """

    position: int
    title: str
    result: str
    text: str
    places: Callable[[Result], Mapping[str, str]]
    given: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    words: Callable[[Result], Mapping[str, bool]] = _no_words
    headlines: Callable[[Result], list[Headline]] = _nothing

    def render(self, result: Result) -> str:
        """Return the section with its heading.

        Raises:
            ReportError: A place is not known or not used, or a figure is not a place.
        """
        wanted = {name for _, name, _, _ in Formatter().parse(self.text) if name}
        places = {"targets": self.targets(result), **self.places(result)}
        if missing := wanted - set(places):
            raise ReportError(f"section {self.title!r} has no value for {sorted(missing)}")
        if unused := set(places) - wanted - {"targets"}:
            raise ReportError(f"section {self.title!r} has no place for {sorted(unused)}")
        if typed := sorted(set(figures(self.text)) - set(self.given)):
            raise ReportError(f"section {self.title!r} has figures that no file gives: {typed}")
        body = self.text.strip().format_map(places)
        return wrapped(f"## {self.title}\n\n{result.provenance()}\n\n{body}\n")

    def untrue(self, result: Result) -> Iterator[str]:
        """Yield what is wrong with the words: they are gone, or figures no longer bear them out."""
        said = " ".join(self.text.split())
        for words, borne_out in self.words(result).items():
            if words not in said:
                yield f"section {self.title!r} is to be judged by {words!r}, which it does not say"
            elif not borne_out:
                yield f"section {self.title!r} says {words!r}, which its figures do not bear out"

    def reason(self, name: str) -> str:
        """Return why the target of a verdict was missed."""
        return next(
            (why for pattern, why in self.reasons.items() if re.search(pattern, name)),
            CAUSE_UNKNOWN,
        )

    def targets(self, result: Result) -> str:
        """Return how many targets were met, and which were not and why."""
        every = result.verdicts
        missed = [one for one in every if not one["holds"]]
        if not missed:
            return f"All {len(every)} targets are met."
        cells, before = [], ""
        for one in missed:
            why = self.reason(one["name"])
            shown = "as above" if why == before else why
            cells.append((one["name"], one["target"], number(one["measured"]), shown))
            before = why
        head = ("target missed", "wanted", "measured", "why")
        met = len(every) - len(missed)
        return f"{met} of {len(every)} targets are met.\n\n{table(head, cells)}"


def figures(text: str) -> list[str]:
    """Return the figures in a text that are neither in a place, nor in code, nor part of a name."""
    plain = re.sub(r"\{\w+\}", " ", text)
    plain = re.sub(r"^ {4}.*$|`[^`]*`|\]\([^)]*\)", " ", plain, flags=re.MULTILINE)
    return re.findall(r"(?<![\w.,-])\d+(?:[.,]\d+)*(?![\w-])", plain)


def wrapped(text: str) -> str:
    """Return a text with its paragraphs and list items broken at ``WIDTH``, code kept whole."""
    blocks = []
    for block in text.split("\n\n"):
        if block.startswith(("|", " ", "#", "!", "```")):
            blocks.append(block)
            continue
        items = re.split(r"\n(?=- )", block)
        blocks.append("\n".join(_filled(item, "  " * item.startswith("- ")) for item in items))
    return "\n\n".join(blocks).rstrip("\n") + "\n"


def _filled(paragraph: str, indent: str) -> str:
    whole = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\0"), " ".join(paragraph.split()))
    lines = textwrap.wrap(
        whole,
        WIDTH,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return "\n".join(lines).replace("\0", " ")


def from_verdicts(*patterns: str) -> Callable[[Result], list[Headline]]:
    """Return a function that gives the verdicts that fit these patterns to the README."""

    def headlines(result: Result) -> list[Headline]:
        return [
            (one["name"], one["target"], number(one["measured"]), one["holds"])
            for pattern in patterns
            for one in result.matching(pattern)
        ]

    return headlines
