"""A check as JUnit XML, for the test pages of CI systems: one test case per fast path, one per other finding."""

from __future__ import annotations

import xml.etree.ElementTree as ET  # writes only; nothing is parsed here

from kernelguard.judge.values import Status
from kernelguard.report.document import Check


def to_junit(check: Check) -> str:
    """The XML text. A fail is a failure, unknown an error; a warning is a failure only under `--strict`."""
    cases = [
        _case(f"{path.model_type}.{path.symbol}", path.status, path.reason, path.fix, check.strict)
        for path in check.assessment.fast_paths
    ]
    cases += [
        _case(finding.code, finding.status, finding.reason, finding.fix, check.strict)
        for finding in check.assessment.findings
        if finding.fast_path is None
    ]
    suite = ET.Element(
        "testsuite",
        name=f"kernelguard check {check.declaration.config.source}",
        tests=str(len(cases)),
        failures=str(sum(c.find("failure") is not None for c in cases)),
        errors=str(sum(c.find("error") is not None for c in cases)),
    )
    suite.extend(cases)
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _case(name: str, status: Status, reason: str, fix: str, strict: bool) -> ET.Element:
    case = ET.Element("testcase", classname="kernelguard", name=_xml(name))
    text = _xml(reason + (f"\nfix: {fix}" if fix else ""))
    if status is Status.FAIL or (status is Status.WARN and strict):
        ET.SubElement(case, "failure", type=str(status), message=_xml(reason)).text = text
    elif status is Status.UNKNOWN:
        ET.SubElement(case, "error", type=str(status), message=_xml(reason)).text = text
    elif status is Status.WARN:
        ET.SubElement(case, "system-out").text = text
    return case


def _xml(text: str) -> str:
    """Original error texts may hold control characters, which XML 1.0 cannot carry."""
    return "".join(c if c in "\t\n\r" or c >= " " else "\N{REPLACEMENT CHARACTER}" for c in text)
