"""HTML tables for notebooks: all text is escaped, rows and columns have headers, and nothing is executable."""

from html.parser import HTMLParser

from redeqx.monitor import HtmlPage

VOID = {"br"}


class ParsedPage(HTMLParser):
    """The tags with attributes and the texts of a page. Asserts that every tag is closed."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open += [tag] * (tag not in VOID)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_page_has_the_texts_of_a_console():
    page = HtmlPage()
    page.header({"devices": "8 x cpu\none host"}, title="dry run")
    page.table("bytes", ("what", "size"), [("a", "1 B"), ("b", "2 B")])
    page.info("x  y\nz", title="text")
    page.warnings([])
    page.warnings(["first", "second"])
    read = ParsedPage(page.html())
    assert read.texts == [
        "dry run", "devices", "8 x cpu", "one host", "bytes", "what", "size", "a", "1 B", "b", "2 B", "text", "x  y\nz",
        "Warnings", "first", "second",
    ]  # fmt: skip
    assert [attrs["scope"] for tag, attrs in read.tags if tag == "th"] == ["row", "col", "col", "row", "row"]
    assert [tag for tag, _ in read.tags].count("caption") == 2


def test_wide_table_scrolls():
    page = HtmlPage()
    page.table("bytes", ("what", "size"), [("a", "1 B")])
    tags = ParsedPage(page.html()).tags
    assert tags[1] == ("div", {"style": "overflow-x:auto"}) and tags[2][0] == "table"


def test_text_is_escaped():
    evil = '<script>alert("&")</script>'
    page = HtmlPage()
    page.header({evil: evil}, title=evil)
    page.table(evil, (evil, evil), [(evil, evil)])
    page.info(evil, title=evil)
    page.warnings([evil])
    read = ParsedPage(page.html())
    assert read.texts.count(evil) == 11 and "script" not in {tag for tag, _ in read.tags}
    assert not any(name.startswith("on") or name == "href" for _, attrs in read.tags for name in attrs)


def test_empty_page_has_no_text():
    assert ParsedPage(HtmlPage().html()).texts == []
