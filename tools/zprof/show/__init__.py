"""What is made of an analysed run: a report, pages, other tools' formats, and a live view."""
