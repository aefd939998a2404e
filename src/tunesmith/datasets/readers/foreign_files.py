"""Files that are no text of JSON, known by how they begin: refused by name before a line of them is read."""

from __future__ import annotations

from tunesmith.core.errors import DataError

_UNPACK = "unpack it first"
_EXPORT = "export its rows as JSONL or Parquet"
_FOREIGN = (  # the longer beginnings first
    (b"\xff\xfe\x00\x00", "is UTF-32 (little endian)", "convert it: iconv -f UTF-32 -t UTF-8"),
    (b"\x00\x00\xfe\xff", "is UTF-32 (big endian)", "convert it: iconv -f UTF-32 -t UTF-8"),
    (b"\xff\xfe", "is UTF-16 (little endian)", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "is UTF-16 (big endian)", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"{\x00", "is UTF-16 (little endian, without a mark)", "convert it: iconv -f UTF-16LE -t UTF-8"),
    (b"\x00{", "is UTF-16 (big endian, without a mark)", "convert it: iconv -f UTF-16BE -t UTF-8"),
    (b"\x1f\x8b", "is compressed (gzip) twice", "unpack it once: gunzip"),
    (b"\x28\xb5\x2f\xfd", "is compressed (zstd) twice", "unpack it once: zstd -d"),
    (b"PK\x03\x04", "is a zip archive (so are .xlsx and .docx)", "unpack it first: unzip"),
    (b"PK\x05\x06", "is an empty zip archive", "give the file itself"),
    (b"PK\x07\x08", "is a part of a zip archive", "unpack it first: unzip"),
    (b"PAR1", "is a Parquet file in an archive", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "is a 7z archive", _UNPACK),
    (b"Rar!\x1a\x07", "is a rar archive", _UNPACK),
    (b"\xfd7zXZ\x00", "is compressed (xz)", "unpack it first: unxz"),
    (b"BZh", "is compressed (bzip2)", "unpack it first: bunzip2"),
    (b"\x04\x22\x4d\x18", "is compressed (lz4)", "unpack it first: lz4 -d"),
    (b"\x1f\x9d", "is compressed (compress)", "unpack it first: uncompress"),
    (b"%PDF", "is a PDF", "extract its text into JSONL"),
    (b"\xd0\xcf\x11\xe0", "is an old Office file (.xls, .doc)", _EXPORT),
    (b"{\\rtf", "is an RTF document", "extract its text into JSONL"),
    (b"SQLite format 3\x00", "is an SQLite database", _EXPORT),
    (b"\x80\x02", "is a Python pickle", _EXPORT),
    (b"\x80\x03", "is a Python pickle", _EXPORT),
    (b"\x80\x04", "is a Python pickle", _EXPORT),
    (b"\x80\x05", "is a Python pickle", _EXPORT),
    (b"ARROW1", "is an Arrow file", "write it as Parquet or JSONL"),
    (b"FEA1", "is a Feather file", "write it as Parquet or JSONL"),
    (b"ORC", "is an ORC file", "write it as Parquet or JSONL"),
    (b"Obj\x01", "is an Avro file", "write it as Parquet or JSONL"),
    (b"\x89HDF", "is an HDF5 file", _EXPORT),
    (b"\x93NUMPY", "is a NumPy array", _EXPORT),
    (b"GGUF", "is a model (GGUF)", "give examples to train on"),
    (b"\x7fELF", "is a program", "give examples to train on"),
)
_TAR_HEADER = 512
_TAR_SUM = slice(148, 156)


def refuse_foreign(name: str, beginning: bytes) -> None:
    """Raise where a file that begins like this is something else than JSON in UTF-8."""
    for mark, what, fix in _FOREIGN:
        if beginning.startswith(mark):
            raise DataError(f"{name} {what}, not JSONL in UTF-8; {fix}")
    if _is_tar(beginning):
        raise DataError(f"{name} is a tar archive, not JSONL in UTF-8; unpack it first: tar -xf")


def _is_tar(beginning: bytes) -> bool:
    """By the sum in its header: the oldest kind has no other mark."""
    header = beginning[:_TAR_HEADER]
    if len(header) < _TAR_HEADER or header[257:262] == b"ustar":
        return header[257:262] == b"ustar"
    told = header[_TAR_SUM].strip(b" \0")
    if not told or not all(byte in b"01234567" for byte in told):
        return False
    return int(told, 8) == sum(header) - sum(header[_TAR_SUM]) + 8 * ord(" ")
