"""Small PDFs, made by hand."""

from __future__ import annotations

from collections.abc import Sequence


def pdf(
    pages: Sequence[str], *, size: str = "200 100", trailer: str = "", content: str = ""
) -> bytes:
    """A PDF whose pages show a line of text each.

    Args:
        size: width and height of the pages, in points.
        trailer: further entries of the trailer.
        content: operators that each page begins with.
    """
    count = len(pages)
    kids = " ".join(f"{4 + 2 * index} 0 R" for index in range(count))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {count} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for index, text in enumerate(pages):
        stream = f"BT /F1 18 Tf 10 40 Td ({text}) Tj ET" if text else ""
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {size}] /Contents {5 + 2 * index} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>",
            f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
        ]
    data, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    start, size_entry = len(data), len(objects) + 1
    return data + (
        f"xref\n0 {size_entry}\n0000000000 65535 f \n{table}trailer\n"
        f"<< /Size {size_entry} /Root 1 0 R {trailer} >>\nstartxref\n{start}\n%%EOF\n"
    ).encode("latin-1")


def encrypted_pdf() -> bytes:
    """A PDF that nobody has the password of."""
    key = "00" * 32
    crypt = f"<< /Filter /Standard /V 1 /R 2 /O <{key}> /U <{key}> /P -4 >>"
    return pdf(["secret"], trailer=f"/Encrypt {crypt} /ID [<00> <00>]")
