"""A page as a tree of elements, parsed strictly enough to reject an unclosed tag."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Element:
    """An element with its attributes, children and text."""

    def __init__(self, tag, attributes=()):
        self.tag, self.attributes, self.children = tag, dict(attributes), []

    @property
    def text(self):
        parts = (child if isinstance(child, str) else child.text for child in self.children)
        return " ".join("".join(parts).split())

    def all(self, *tags):
        """Return the elements inside that have one of the tags, in document order."""
        elements = []
        for child in self.children:
            if isinstance(child, Element):
                elements += [child] if child.tag in tags else []
                elements += child.all(*tags)
        return elements

    def one(self, tag, **attributes):
        (element,) = [candidate for candidate in self.all(tag) if attributes.items() <= candidate.attributes.items()]
        return element


class _Parser(HTMLParser):
    def __init__(self):
        super().__init__()
        self.root = Element("")
        self.open = [self.root]

    def handle_starttag(self, tag, attrs):
        element = Element(tag, attrs)
        assert len(element.attributes) == len(attrs), f"{tag} has an attribute twice"
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.open[-1].children.append(Element(tag, attrs))

    def handle_endtag(self, tag):
        assert tag == self.open.pop().tag

    def handle_data(self, data):
        self.open[-1].children.append(data)


def parse(text):
    """Return the root of a page."""
    parser = _Parser()
    parser.feed(text)
    parser.close()
    assert parser.open == [parser.root], [element.tag for element in parser.open]
    return parser.root


def lines_of(table):
    """Return the body of a table as (name, cells), and the names of its columns."""
    headings = [cell.text for cell in table.one("thead").all("tr")[-1].all("th") if cell.text != "name"]
    rows = [row for body in table.all("tbody") for row in body.all("tr") if row.all("td")]
    return headings, [(row.all("th")[0].text, row.all("td")) for row in rows]
