import random
import unittest

import terminus_plugin as tp
from terminus_plugin import contract_pb2 as pb
from terminus_plugin import plan as plans
from terminus_plugin.plan import Copy, PageSet, Run


def pool(id, pages, *tensors):
    def resolve(t):
        t.region = tp.Region(t.region_id, tp.MemoryKind.HOST_SHM, 1 << 40)
        return t.region.size

    return plans.new_pool(
        pb.PoolAdd(
            pool=id,
            pages=pages,
            tensors=[
                pb.Tensor(region=r, offset=o, page_stride=s, page_bytes=b, layer=layer) for r, o, s, b, layer in tensors
            ],
        ),
        resolve,
    )


def add(*slices, src_pages=1, dst_pages=1):
    names = (
        "src_tensor",
        "dst_tensor",
        "src_off",
        "dst_off",
        "len",
        "src_stride",
        "dst_stride",
        "count",
        "src_page",
        "dst_page",
    )
    return pb.PlanAdd(
        plan=1, src_pages=src_pages, dst_pages=dst_pages, slices=[pb.Slice(**dict(zip(names, s))) for s in slices]
    )


class TestPlan(unittest.TestCase):
    def test_random_plans_move_every_byte_once(self):
        """copies and rows against the plain definition of the contract."""
        rng = random.Random(1)
        for _ in range(60):
            pages, layers = rng.randint(1, 12), rng.randint(1, 3)
            stride = rng.choice([64, 96])
            tensors = [(1 + rng.randint(0, 1), i * 4096, stride, 64, i // 2) for i in range(2 * layers)]
            src, dst = pool(1, pages, *tensors), pool(2, pages, *tensors)
            slices = []
            for i in range(2 * layers):
                if rng.random() < 0.5:
                    slices.append((i, i, 0, 0, 64, 0, 0, 1))
                else:
                    n = rng.choice([8, 16, 32])
                    slices.append((i, i, 0, 0, n, n, n, 64 // n))
                    if rng.random() < 0.5:
                        slices[-1] = (i, i, 0, 0, n // 2, n, n, 64 // n)
            plan = plans.new_plan(add(*slices), src, dst, False)
            order, to = list(range(pages)), list(range(pages))
            rng.shuffle(order)
            rng.shuffle(to)
            lo = rng.randint(0, layers - 1)
            hi = rng.randint(lo + 1, layers)
            a, b = [Run(p, 1, 1) for p in order], [Run(p, 1, 1) for p in to]
            want = []
            for s_t, d_t, so, do, n, ss, ds, count in slices:
                s, d = src.tensors[s_t], dst.tensors[d_t]
                if not lo <= s.layer < hi:
                    continue
                for p, q in zip(order, to):
                    for i in range(count):
                        for k in range(n):
                            want.append(
                                (
                                    s.region_id,
                                    s.offset + p * s.page_stride + so + i * ss + k,
                                    d.region_id,
                                    d.offset + q * d.page_stride + do + i * ds + k,
                                )
                            )
            copied = list(plan.copies(a, b, lo, hi))
            got = [(c.src.id, c.src_off + k, c.dst_region, c.dst_off + k) for c in copied for k in range(c.len)]
            rows = [
                (r.src.id, r.src_off + i * r.src_stride + k, r.dst_region, r.dst_off + i * r.dst_stride + k)
                for r in plan.rows(a, b, lo, hi)
                for i in range(r.count)
                for k in range(r.len)
            ]
            self.assertEqual(sorted(rows), sorted(want))
            self.assertEqual(sorted(got), sorted(want))
            self.assertEqual(len(got), plan.bytes_per_group(lo, hi) * pages)

    def test_neighbours_are_joined(self):
        src = pool(1, 8, (1, 0, 64, 64, 0), (1, 4096, 64, 64, 1))
        plan = plans.new_plan(add((0, 0, 0, 0, 16, 16, 16, 4), (1, 1, 0, 0, 64, 0, 0, 1)), src, src, False)
        copied = list(plan.copies([Run(0, 8, 1)], [Run(0, 8, 1)], 0, 9))
        self.assertEqual([(c.src_off, c.dst_off, c.len) for c in copied], [(0, 0, 512), (4096, 4096, 512)])
        strided = list(plan.copies([Run(0, 2, 4)], [Run(5, 2, 1)], 0, 1))
        self.assertEqual([(c.src_off, c.dst_off, c.len) for c in strided], [(0, 320, 64), (256, 384, 64)])

    def test_pairs(self):
        got = list(plans.pair_runs([Run(0, 3, 2), Run(9, 2, 1)], [Run(5, 1, 1), Run(1, 4, 1)]))
        self.assertEqual(
            got, [(Run(0, 1, 2), Run(5, 1, 1)), (Run(2, 2, 2), Run(1, 2, 1)), (Run(9, 2, 1), Run(3, 2, 1))]
        )

    def test_bad(self):
        p, q = pool(1, 4, (1, 0, 64, 64, 0)), pool(2, 4, (1, 0, 64, 64, 1))
        big = (1 << 64) - 1
        for says, slices, dst in (
            ("slices[0].src_tensor is 1", [(1, 0, 0, 0, 1, 0, 0, 1)], p),
            ("slices[0].dst_tensor is 1", [(0, 1, 0, 0, 1, 0, 0, 1)], p),
            ("neither may be 0", [(0, 0, 0, 0, 0, 0, 0, 1)], p),
            ("neither may be 0", [(0, 0, 0, 0, 1, 0, 0, 0)], p),
            ("source layer 0, destination layer 1", [(0, 0, 0, 0, 1, 0, 0, 1)], q),
            ("source bytes leave the page", [(0, 0, 64, 0, 1, 0, 0, 1)], p),
            ("source bytes leave the page", [(0, 0, big, 0, big, big, 0, 9)], p),
            ("destination bytes leave the page", [(0, 0, 0, big, 1, 0, 0, 1)], p),
            ("pieces overlap", [(0, 0, 0, 0, 8, 8, 4, 2)], p),
        ):
            with (
                self.subTest(says),
                self.assertRaisesRegex(plans.BadPlan, says.replace("[", r"\[").replace("]", r"\]")),
            ):
                plans.new_plan(add(*slices), p, dst, False)
        with self.assertRaises(tp.Error) as e:
            plans.new_plan(add(src_pages=2), p, p, False)
        self.assertEqual(e.exception.cause, tp.Cause.UNSUPPORTED)
        for m in (add(src_pages=0), add(dst_pages=4097), add((0, 0, 0, 0, 1, 0, 0, 1, 2), src_pages=2)):
            with self.assertRaises(plans.BadPlan):
                plans.new_plan(m, p, p, True)
        with self.assertRaisesRegex(plans.BadPlan, "src_page 1"):
            plans.new_plan(add((0, 0, 0, 0, 1, 0, 0, 1, 1)), p, p, False)
        for says, args in (
            ("pages is 0", (1, 0)),
            ("tensors is empty", (1, 1)),
            ("page_bytes 65, page_stride 64", (1, 1, (1, 0, 64, 65, 0))),
            ("leave the region", (1, 2, (1, big, 64, 64, 0))),
        ):
            with self.subTest(says), self.assertRaisesRegex(plans.BadPlan, says):
                pool(*args)

    def test_groups_of_pages(self):
        """Two pages of 64 become one of 128, in any order of runs."""
        rng = random.Random(2)
        small, large = pool(1, 64, (1, 0, 64, 64, 0)), pool(2, 32, (1, 0, 128, 128, 0))
        for m, src, dst in (
            (add((0, 0, 0, 0, 64, 0, 0, 1, 0, 0), (0, 0, 0, 64, 64, 0, 0, 1, 1, 0), src_pages=2), small, large),
            (add((0, 0, 0, 0, 64, 0, 0, 1, 0, 0), (0, 0, 64, 0, 64, 0, 0, 1, 0, 1), dst_pages=2), large, small),
        ):
            plan = plans.new_plan(m, src, dst, True)
            self.assertEqual(plan.bytes_per_group(), 128)
            for _ in range(50):
                groups = rng.randint(1, 8)
                lists = [self.runs(rng, p.pages, n * groups) for p, n in ((src, m.src_pages), (dst, m.dst_pages))]
                pages = [[r.start + i * r.stride for r in runs for i in range(r.count)] for runs in lists]
                want = set()
                for k in range(groups):
                    for s in plan.slices:
                        a, b = pages[0][k * m.src_pages + s.src_page], pages[1][k * m.dst_pages + s.dst_page]
                        want |= {
                            (a * s.src.page_stride + s.src_off + i, b * s.dst.page_stride + s.dst_off + i)
                            for i in range(64)
                        }
                got = [(c.src_off + i, c.dst_off + i) for c in plan.copies(*lists, 0, 1) for i in range(c.len)]
                self.assertEqual((len(got), set(got)), (len(want), want))

    @staticmethod
    def runs(rng, pages, n):
        """n pages as runs."""
        out = []
        while n:
            stride = rng.choice([1, 1, 2, 3])
            count = rng.randint(1, min(n, (pages - 1) // stride))
            out.append(Run(rng.randint(0, pages - 1 - (count - 1) * stride), count, stride))
            n -= count
        return out

    def test_page_set(self):
        s = PageSet([Run(4, 2, 1), Run(0, 3, 3), Run(5, 1, 1), Run(1, 1, 1)])
        self.assertEqual([p for p in range(12) if p in s], [0, 1, 3, 4, 5, 6])
        self.assertEqual((len(s), len(PageSet()), 0 in PageSet()), (6, 0, False))

    def test_pieces(self):
        region = tp.Region(1, tp.MemoryKind.HOST_SHM, 100)

        class State:
            source = dest = [Run(0, 1, 1)]
            layer_from, layer_to = 0, 1

            class plan:
                @staticmethod
                def copies(*_):
                    return [Copy(region, 0, 2, None, 50, 10)]

        op = tp.Op(State)
        self.assertEqual([(c.src_off, c.dst_off, c.len) for c in op.pieces(4)], [(0, 50, 4), (4, 54, 4), (8, 58, 2)])
        self.assertEqual(list(op.copies()), [Copy(region, 0, 2, None, 50, 10)])
