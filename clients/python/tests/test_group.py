"""The group's list against the fake engine in this process: one session a rank."""
import json
import pickle
import unittest

import support
from terminus_client import BadField, BadState, GroupItem, KVPoll, NotReusable, TerminusError
from test_client import EngineCase

UNKNOWN = "outcome_unknown"


class GroupCase(EngineCase):
    def ranks(self, role, size=2, **kw):
        out = []
        for rank in range(size):
            out.append(self.client(role, rank=rank, size=size, slots=8, group_list=True, **kw))
        return out, self.engine.sessions[-size:]

    def list(self, client):
        """Rank 0's next list that is not empty, as it comes out at another rank."""
        got = []
        self.eventually(lambda: got.extend(client.poll_group()) or got)
        self.assertEqual(pickle.loads(pickle.dumps(got)), got)
        return [GroupItem(*i) for i in json.loads(json.dumps(got))]


class Decides(GroupCase):
    def test_list_is_right(self):
        (first, second), (s0, s1) = self.ranks("destination")
        rooms = {c: [c.open(n, "p") for n in range(3)] for c in (first, second)}
        for c in (first, second):
            self.assertEqual([r.slot for r in rooms[c]], [0, 1, 2])
        for s in (s0, s1):
            for slot in range(3):
                s.set(slot, 2, 1)
        got = self.list(first)
        self.eventually(lambda: got.extend(first.poll_group()) or len(got) == 3)
        self.assertEqual(sorted(got), [(n, 0, KVPoll.WaitingForInput, "") for n in range(3)])
        self.assertEqual([c.opened for c in second.apply_group(sorted(got))], rooms[second])
        self.assertEqual(first.poll_group(), [])

        s1.end(0, 0, 4, UNKNOWN)  # rank 0 will say Success
        s1.end(1, 4, 4, "success")  # rank 0 will say Failed
        s0.end(1, 0, 4, "worker_lost")
        for room in rooms[second][:2]:
            self.eventually(lambda: KVPoll.terminal(room.poll()))
            self.assertFalse(room.reusable)
            with self.assertRaises(NotReusable) as e:
                room.release()
            self.assertIn("list", str(e.exception))
        got = self.list(first)
        self.assertEqual(got, [(1, 0, KVPoll.Failed, "worker_lost")])
        change, = second.apply_group(got)
        self.assertEqual(tuple(change), (1, 0, KVPoll.Failed, "worker_lost", rooms[second][1]))
        self.assertTrue(rooms[second][1].reusable)
        self.assertFalse(rooms[second][0].reusable)
        self.assertFalse(rooms[first][1].reusable)
        first.apply_group(got)
        self.assertTrue(rooms[first][1].reusable)

        s0.end(0, 4, 4, "success")
        s0.end(2, 4, 4, "success")
        got = self.list(first)
        self.eventually(lambda: got.extend(first.poll_group()) or len(got) == 2)
        self.assertEqual(got, [(0, 0, KVPoll.Success, ""), (2, 0, KVPoll.Success, "")])
        first.apply_group(got)
        second.apply_group(got)
        self.assertTrue(rooms[second][0].reusable)
        self.assertEqual(rooms[second][0].poll(), KVPoll.Failed)
        self.assertFalse(rooms[second][2].reusable, "its own engine still has the pages")
        for c in (first, second):
            for room in rooms[c][:2]:
                room.release()
        self.assertFalse(first._group._rooms.keys() - {(2, 0)})

    def test_sleeper_is_woken(self):
        (first, second), (s0, s1) = self.ranks("destination")
        room = second.open(1, "p")
        s1.end(room.slot, 0, 4, "aborted")
        woken = []
        thread = support.start(lambda: woken.append(room.wait_reusable(20)))
        self.eventually(lambda: KVPoll.terminal(room.poll()))
        self.assertFalse(woken)
        second.apply_group([(1, 0, KVPoll.Failed, "aborted")])
        thread.join(10)
        self.assertEqual(woken, [True])

    def test_sources_keep_nothing(self):
        (first, second), (s0, s1) = self.ranks("source")
        for c, s in ((first, s0), (second, s1)):
            room = c.open(5)
            s.end(room.slot, 0, 4, "stalled")
            self.eventually(lambda: room.poll() == KVPoll.Failed and room.reusable)
            room.release()
        # Released before it was listed: the reason went with it.
        self.assertEqual(self.list(first), [(5, 0, KVPoll.Failed, "")])
        self.assertEqual(first.poll_group(), [])

    def test_silent_engine(self):
        (first, _), (s0, _) = self.ranks("destination")
        self.engine.on["failure"] = self.unanswered
        room = first.open(5, "p")
        s0.end(room.slot, 0, 4, "stalled")
        self.assertEqual(self.list(first), [(5, 0, KVPoll.Failed, "")])


class Refused(GroupCase):
    def test_refused_opens_are_listed(self):
        (first, second), _ = self.ranks("destination")
        self.engine.on["open"] = lambda s, h, p, f: s.error("limit", "slots", "W10", "no slot is free")
        with self.assertRaises(TerminusError):
            first.open(8, "p", attempt=3)
        first.open(9, "p", wait=False)
        got = self.list(first)
        self.eventually(lambda: got.extend(first.poll_group()) or len(got) == 2)
        self.assertEqual(got, [(8, 3, KVPoll.Failed, "limit"), (9, 0, KVPoll.Failed, "limit")])
        self.engine.on["open"] = lambda s, h, p, f: {"ended": True, "reason": "success"}
        first.open(10, "p")
        self.assertEqual(self.list(first), [(10, 0, KVPoll.Success, "")])
        with self.assertRaises(TerminusError):
            self.engine.on["open"] = lambda s, h, p, f: s.error("refused")
            second.open(9, "p")
        self.assertEqual((first._group._rooms, second._group._rooms), ({}, {}))

    def test_ended_before_it_was_opened(self):
        (_, second), _ = self.ranks("destination")
        change, other = second.apply_group([(1, 0, KVPoll.Failed, "aborted"), (2, 0, KVPoll.Transferring, "")])
        self.assertIsNone(change.opened)
        self.assertTrue(second.open(1, "p").reusable)
        self.assertFalse(second.open(2, "p").reusable)

    def test_open_on_its_way_is_not_a_room_yet(self):
        (_, second), _ = self.ranks("destination")
        self.engine.on["open"] = self.unanswered
        second.open(1, "p", wait=False)
        change, = second.apply_group([(1, 0, KVPoll.Failed, "aborted")])
        self.assertIsNone(change.opened)

    def test_list_applied_twice_changes_nothing(self):
        (first, second), _ = self.ranks("destination")
        room = second.open(1, "p")
        for items in ([(1, 0, KVPoll.WaitingForInput, ""), (2, 0, KVPoll.Transferring, "")],
                      [(1, 0, KVPoll.Success, ""), (2, 0, KVPoll.Failed, "aborted"), (1, 0, KVPoll.Success, "")]):
            self.assertEqual([c[:2] for c in second.apply_group(items)], [(1, 0), (2, 0)])
            self.assertEqual(second.apply_group(items), [])
        self.assertTrue(room.reusable)
        second.apply_group([(1, 1, KVPoll.Failed, "aborted")])
        self.assertEqual(second.apply_group([(1, 0, KVPoll.Transferring, "")]), [])

    def test_applied_verdict_is_sticky(self):
        (first, second), (_, s1) = self.ranks("destination")
        room = second.open(1, "p")
        change, = second.apply_group([(1, 0, KVPoll.Failed, "aborted")])
        self.assertIs(change.opened, room)
        self.assertEqual(second.apply_group([(1, 0, KVPoll.Success, "")]), [])
        second.apply_group([(2, 0, KVPoll.Failed, "aborted")])  # not open here
        self.assertTrue(second.open(2, "p").reusable)
        self.assertEqual(second.apply_group([(2, 0, KVPoll.Success, "")]), [])
        self.assertEqual([c.room for c in second.apply_group([(2, 1, KVPoll.Success, "")])], [2])
        left = second.open(3, "p")
        self.assertEqual([c.room for c in second.end_group()], [3])
        self.assertEqual(second.apply_group([(3, 0, KVPoll.Success, "")]), [])
        self.assertTrue(left.reusable)

        s1.end(room.slot, 0, 4, "aborted")
        self.eventually(lambda: room.poll() == KVPoll.Failed)
        room.release()
        self.assertEqual(second.apply_group([(1, 0, KVPoll.Success, "")]), [], "released, and the verdict forgotten")
        # Another open of a number that was in use here is another room.
        again = second.open(1, "p")
        self.assertFalse(again.reusable)
        change, = second.apply_group([(1, 0, KVPoll.Success, "")])
        self.assertIs(change.opened, again)

    def test_bad_item_is_named_and_nothing_applied(self):
        (first, second), _ = self.ranks("destination")
        room = second.open(1, "p")
        good = (1, 0, KVPoll.Failed, "aborted")
        for bad, field in (((2, 0, 99, ""), "status"), ((2, 0, -1, ""), "status"), ((2, 0, "Failed", ""), "status"),
                           (("a", 0, 0, ""), "room"), ((-1, 0, 0, ""), "room"), ((2, 1.5, 0, ""), "attempt"),
                           ((2, 1 << 63, 0, ""), "attempt"), ((2, 0, 0, None), "reason")):
            with self.assertRaises(BadField) as e:
                second.apply_group([good, bad])
            self.assertEqual(e.exception.field, f"list[1].{field}")
            self.assertEqual(str(e.exception).count(f"list[1].{field}: "), 1)
        for bad, field in (([good, 5], "list[1]"), ([(1,)], "list[0]"), ([(1, 2, 3, 4, 5)], "list[0]"), (5, "list")):
            with self.assertRaises(BadField) as e:
                second.apply_group(bad)
            self.assertEqual(e.exception.field, field)
        self.assertFalse(room.reusable)

    def test_end_group_is_not_for_rank_0(self):
        (first, _), _ = self.ranks("destination")
        room = first.open(1, "p")
        with self.assertRaises(BadState):
            first.end_group()
        self.assertFalse(room.reusable)

    def test_misuse(self):
        (first, second), _ = self.ranks("destination")
        plain = self.client("destination")
        for call in (second.poll_group, plain.poll_group, lambda: plain.apply_group([]), plain.end_group):
            with self.assertRaises(BadState):
                call()
        self.assertTrue(plain.open(1, "p").reusable)


class Lost(GroupCase):
    def lose(self, session):
        session.conn.shutdown(2)

    def test_rank_0_lists_what_its_engine_took_along(self):
        (first, _), (s0, _) = self.ranks("destination")
        first.open(3, "p")
        first.open(2, "p", attempt=1)
        s0.set(0, 2, 1)
        self.assertEqual(self.list(first), [(3, 0, KVPoll.WaitingForInput, "")])
        self.engine.on["open"] = self.unanswered
        first.open(4, "p", wait=False)
        self.lose(s0)
        self.eventually(lambda: first.lost)
        got = self.list(first)
        self.eventually(lambda: got.extend(first.poll_group()) or len(got) == 3)
        self.assertEqual(sorted(got), [(2, 1, KVPoll.Failed, "engine_lost"), (3, 0, KVPoll.Failed, "engine_lost"),
                                       (4, 0, KVPoll.Failed, "engine_lost")])
        with self.assertRaises(TerminusError):
            first.open(5, "p")
        self.assertEqual(self.list(first), [(5, 0, KVPoll.Failed, "engine_lost")])
        self.assertEqual(first.poll_group(), [])

    def test_other_rank_waits_for_the_list_over_a_redial(self):
        (_, second), (_, s1) = self.ranks("destination")
        a, b, c = (second.open(n, "p") for n in range(3))
        s1.end(a.slot, 0, 4, "aborted")
        self.eventually(lambda: a.poll() == KVPoll.Failed)
        second.apply_group([(0, 0, KVPoll.Failed, "aborted")])
        self.lose(s1)
        self.eventually(lambda: second.lost)
        again = second.redial(20)
        self.clients.append(again)
        self.assertEqual((a.reusable, b.reusable, c.reusable), (True, False, False))
        new = again.open(7, "p")
        change, = again.apply_group([(1, 0, KVPoll.Success, "")])
        self.assertIs(change.opened, b)
        self.assertTrue(b.reusable)
        ended = again.end_group()
        self.assertEqual([tuple(e) for e in ended],
                         [(2, 0, KVPoll.Failed, UNKNOWN, c), (7, 0, KVPoll.Failed, UNKNOWN, new)])
        self.assertTrue(c.reusable and new.reusable)
        self.assertEqual(again.end_group(), [])

    def test_rank_0_redials_before_it_polls(self):
        (first, _), (s0, _) = self.ranks("destination")
        first.open(3, "p")
        self.lose(s0)
        self.eventually(lambda: first.lost)
        again = first.redial(20)
        self.clients.append(again)
        room = again.open(4, "p")
        self.engine.session.set(room.slot, 2, 1)
        got = self.list(again)
        self.eventually(lambda: got.extend(again.poll_group()) or len(got) == 2)
        self.assertEqual(sorted(got), [(3, 0, KVPoll.Failed, "engine_lost"), (4, 0, KVPoll.WaitingForInput, "")])


if __name__ == "__main__":
    unittest.main()
