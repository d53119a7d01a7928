import json
import unittest
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from terminus_plugin import options
from terminus_plugin.options import BadOptions


@dataclass
class Lane:
    speed: float = 1.5
    name: str = ""


@dataclass
class Options:
    lanes: int = 4
    copy: bool = True
    device: Optional[str] = field(default=None, metadata={"description": "which one"})
    weights: List[float] = field(default_factory=list)
    sub: Lane = field(default_factory=Lane)
    table: Dict[str, Lane] = field(default_factory=dict)
    free: Any = None


class TestOptions(unittest.TestCase):
    def test_schema(self):
        s = json.loads(options.schema(Options(lanes=8)))
        self.assertEqual(s["$schema"], "https://json-schema.org/draft/2020-12/schema")
        self.assertIs(s["additionalProperties"], False)
        p = s["properties"]
        self.assertEqual(p["lanes"], {"type": "integer", "default": 8})
        self.assertEqual(p["device"], {"type": ["string", "null"], "default": None, "description": "which one"})
        self.assertEqual(p["weights"], {"type": "array", "items": {"type": "number"}, "default": []})
        self.assertEqual(p["sub"]["properties"]["speed"], {"type": "number"})
        self.assertEqual(p["sub"]["default"], {"speed": 1.5, "name": ""})
        self.assertEqual(json.loads(options.schema(None))["additionalProperties"], False)

    def test_decode(self):
        o = options.decode(
            b' {"lanes":9,"device":"mlx5","weights":[1,2.5],"sub":{"name":"a"},"table":{"x":{"speed":2}},"free":[1]}',
            Options(),
        )
        self.assertEqual(o, Options(9, True, "mlx5", [1.0, 2.5], Lane(1.5, "a"), {"x": Lane(2.0, "")}, [1]))
        self.assertEqual(options.decode(b"", Options()), Options())
        self.assertIsNone(options.decode(b"{}", None))

    def test_bad(self):
        for raw, says in (
            ("{", "not JSON"),
            ("[]", "must be an object, not an array"),
            ("null", "must be an object, not null"),
            ('{"lane":1}', 'unknown option "lane": did you mean "lanes"?'),
            ('{"zzzzzzzzz":1}', 'unknown option "zzzzzzzzz": known are copy, device'),
            ('{"sub":{"sped":1}}', 'unknown option "sub.sped": did you mean "speed"?'),
            ('{"table":{"x":{"nane":""}}}', 'unknown option "table.x.nane": did you mean "name"?'),
            ('{"lanes":"4"}', 'option "lanes" must be an integer, not a string'),
            ('{"lanes":true}', 'option "lanes" must be an integer, not a boolean'),
            ('{"lanes":1.5}', 'option "lanes" must be an integer, not a number'),
            ('{"copy":1}', 'option "copy" must be a boolean, not a number'),
            ('{"weights":[1,"2"]}', 'option "weights[1]" must be a number, not a string'),
            ('{"sub":3}', 'option "sub" must be an object, not a number'),
        ):
            with self.subTest(raw), self.assertRaises(BadOptions) as e:
                options.decode(raw.encode(), Options())
            self.assertIn(says, str(e.exception))

    def test_author(self):
        @dataclass
        class Odd:
            when: complex = 0j

        for config, says in ((Odd(), "served"), (Options, "instance of a dataclass"), ({}, "instance of a dataclass")):
            with self.subTest(says), self.assertRaisesRegex(BadOptions, says):
                options.check_config(config)
                options.schema(config)
