"""Nothing that identifies a patient leaves a header: canaries in every element of real files, and the salt."""

from __future__ import annotations

import copy
import json
import os
import stat
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from packer.cli import cli
from packer.errors import UsageError
from packer.sources.ct.errors import PHIError
from packer.sources.ct.privacy import Hasher, check_record, known_kernel, load_salt
from tests.ct_files import FIVE_SLICES, TEST_FILES, make_series, read, write

TEXT = {"AE", "AS", "CS", "DA", "DT", "LO", "LT", "PN", "SH", "ST", "TM", "UC", "UI", "UR", "UT"}
#: What pixels and order need; their text is a number or a code and is tested by the records.
NEEDED = {
    "SOPClassUID", "ImageType", "Modality", "PhotometricInterpretation", "TransferSyntaxUID", "BurnedInAnnotation",
    "LossyImageCompression", "MediaStorageSOPClassUID", "RescaleType", "SpecificCharacterSet",
}  # fmt: skip


def plant(dataset: Any, planted: list[bytes]) -> None:
    """Put a text of its own into every element that can hold one, nested sequences and private tags included."""
    for element in list(dataset):
        if element.VR == "SQ":
            for item in element.value:
                plant(item, planted)
        elif element.keyword not in NEEDED and element.VR in TEXT | {"UN", "OB"} and element.keyword != "PixelData":
            element.value = canary(element.VR, len(planted))
            planted.append(element.value if isinstance(element.value, bytes) else str(element.value).encode())


def canary(vr: str, number: int) -> str | bytes:
    if vr == "UI":
        return f"1.2.77.{number}.31415926"
    if vr in ("UN", "OB"):
        return b"CANARY-%05d-BYTES!" % number
    if vr == "AS":
        return f"0{number % 90 + 10}Y"
    if vr in ("DA", "TM", "DT"):
        return {"DA": "19{:06d}", "TM": "01{:04d}.777", "DT": "19{:06d}010203"}[vr].format(number)
    text = f"CANARY{number:05d}"
    return text if vr != "PN" else f"{text}^SURNAME"


def every_byte(out: Path) -> Iterator[tuple[str, bytes]]:
    for file in sorted(out.rglob("*")):
        if file.is_file():
            yield file.name, file.read_bytes()


def shard(src: Path, out: Path, *args: object) -> Result:
    salt = out.parent / "salt"
    salt.write_bytes(b"a salt for tests, long enough")
    arguments = ["shard", str(src), str(out), "--workers", "1", "--id-salt-file", str(salt), *map(str, args)]
    return CliRunner().invoke(cli, arguments, catch_exceptions=False)


def real_files() -> list[Path]:
    files = [TEST_FILES / "CT_small.dcm", *FIVE_SLICES, TEST_FILES / "J2K_pixelrep_mismatch.dcm"]
    try:
        import data_store
    except ImportError:
        return files
    return [*files, Path(data_store.__file__).parent / "data" / "eCT_Supplemental.dcm"]


@pytest.mark.parametrize("args", [(), ("--sample", "volume"), ("--window", "40,400"), ("--split", "0.5,0.5")])
def test_no_text_of_any_header_is_in_any_byte_of_the_output(tmp_path: Path, args: tuple[str, ...]) -> None:
    planted: list[bytes] = [b"Secret", b"secret"]
    for number, file in enumerate(real_files()):
        dataset = copy.deepcopy(read(file))
        private = dataset.private_block(0x0099, "CANARY CREATOR", create=True)
        private.add_new(0x01, "LO", "to be replaced")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of dates that are none
            plant(dataset, planted)
        if file in FIVE_SLICES:  # they must stay one series, and its patient one
            dataset.SeriesInstanceUID, dataset.StudyInstanceUID, dataset.PatientID = (
                "1.2.77.88",
                "1.2.77.89",
                "CANARYID",
            )
        write(dataset, tmp_path / "in" / "Secret Patient" / f"secret name {number}.dcm")
    planted += [b"1.2.77.88", b"1.2.77.89", b"CANARYID"]
    assert len(planted) > 300
    broken = tmp_path / "in" / "Secret Patient" / "secret broken.dcm"
    broken.write_bytes((tmp_path / "in" / "Secret Patient" / "secret name 0.dcm").read_bytes()[:-3000])
    result = shard(tmp_path / "in", tmp_path / "out", "--on-error", "skip", *args)
    assert result.exit_code == 0, result.output
    looked_at = 0
    for name, data in every_byte(tmp_path / "out"):
        looked_at += 1
        for text in planted:
            # Four digits are in any binary file; what is longer is not there by chance.
            assert len(text) < 6 or text not in data, f"{text!r} in {name}"
    assert looked_at >= 5
    with tarfile.open(next((tmp_path / "out").glob("*.tar"))) as tar:
        assert all(member.name[:16].isalnum() for member in tar)


def test_the_same_salt_gives_the_same_hashes_and_another_gives_others(tmp_path: Path) -> None:
    one, other = Hasher(b"0123456789abcdef"), Hasher(b"another salt 456")
    assert one("P1") == Hasher(b"0123456789abcdef")("P1") != other("P1")
    assert one.fingerprint != other.fingerprint
    assert "0123456789abcdef" not in repr(one)


def test_a_salt_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "salt"
    made = load_salt(str(path))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert len(made.salt) >= 32
    assert load_salt(str(path)) == made
    assert load_salt(str(tmp_path / "other")) != made
    assert sorted(os.listdir(tmp_path / "deep")) == ["salt"]


def test_a_short_salt_is_refused(tmp_path: Path) -> None:
    (tmp_path / "salt").write_bytes(b"short\n")
    with pytest.raises(UsageError, match="5 bytes"):
        load_salt(str(tmp_path / "salt"))


def test_the_salt_must_not_lie_in_the_dataset(tmp_path: Path) -> None:
    make_series(tmp_path / "in", 3)
    arguments = ["shard", str(tmp_path / "in"), str(tmp_path / "out"), "--id-salt-file", str(tmp_path / "out" / "salt")]
    result = CliRunner().invoke(cli, arguments)
    assert (result.exit_code, "lies inside OUT" in result.stderr) == (2, True)
    assert not (tmp_path / "out").exists()


def test_only_the_fingerprint_of_the_salt_is_stored_and_another_salt_is_another_job(tmp_path: Path) -> None:
    make_series(tmp_path / "in", 3)
    assert shard(tmp_path / "in", tmp_path / "out").exit_code == 0
    salt = (tmp_path / "salt").read_bytes()
    assert all(salt not in data for _, data in every_byte(tmp_path / "out"))
    manifest = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert manifest["source"]["made"]["salt_fingerprint"] == Hasher(salt).fingerprint
    (tmp_path / "salt2").write_bytes(b"another salt for the same job")
    again = ["shard", str(tmp_path / "in"), str(tmp_path / "out"), "--id-salt-file", str(tmp_path / "salt2")]
    assert CliRunner().invoke(cli, again).exit_code == 1


def test_a_record_that_holds_anything_else_is_refused() -> None:
    key = "0123456789abcdef_00001"
    check_record(key, {"patient": "0123456789abcdef", "rows": 5, "kernel": "B30f", "ipp": [1.0, 2.0, 3.0]})
    for bad in (
        {"patient": "Miller^Anna"},
        {"series": "1.2.840.113619"},
        {"kernel": "Dr. Miller"},
        {"units": "Miller"},
        {"ipp": ["Miller"]},
        {"name": 1},
        {"kvp": float("nan")},
    ):
        with pytest.raises(PHIError) as error:
            check_record(key, bad)
        assert "Miller" not in str(error.value) and "1.2.840" not in str(error.value)
    with pytest.raises(PHIError):
        check_record("Miller_00001", {})


@pytest.mark.parametrize("kernel", ["B30f", "STANDARD", "FC13", "Br40d", "I31f\\3", "H31s", "FC13-H", "YA", "B"])
def test_known_kernels_are_kept(kernel: str) -> None:
    assert known_kernel(f" {kernel} ") == kernel


@pytest.mark.parametrize("kernel", ["", "CANARY12", "Dr. Miller", "19450612", "B30f for A. Miller", "Müller"])
def test_other_text_in_the_kernel_is_not(kernel: str) -> None:
    assert known_kernel(kernel) is None
