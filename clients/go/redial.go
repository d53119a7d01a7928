package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Pauses between two tries of Redial. An engine that was killed is back in a second or two.
const (
	redialPause   = 20 * time.Millisecond
	redialLongest = 500 * time.Millisecond
)

// Redial follows the loss of the engine: it opens a new session on the same socket, as the same rank of
// the same group, with the same memory. The worker calls it when Done is closed, and goes on with the
// client that it returns:
//
//	for {
//		serve(c) // until c.Done()
//		if errors.Is(c.Err(), client.ErrClosed) {
//			return
//		}
//		if c, err = c.Redial(ctx); err != nil {
//			return err
//		}
//	}
//
// Until ctx ends it tries again while no engine listens, or the one that does is not ready for this
// worker (draining, no backend up, or the rank still taken by the session that was lost). Then it waits for the proof
// that nobody else can write to the regions any more (Region.Reusable), and announces all regions that
// were not closed and all pools again, in their old order: pool numbers in Parts, and Stagings, stay
// valid. As with AddRegion, the last aligned eight bytes of each region are used for a moment, so no
// request may be using them.
//
// Rooms of the old client keep their verdicts and its methods keep working as they do after a loss. When
// Redial returns, the pages of all of them are reusable, except those that the group's list has not ended
// yet (Options.GroupList): the new client's PollGroup and ApplyGroup know them. Retrying a request that failed with engine_lost
// is the router's business: a new attempt, opened with the new client.
//
// An error leaves the old client as it was, so that Redial may be called again. So is the memory, except
// that the last aligned eight bytes of a region that an engine did not get to take before ctx ended, or
// refused, are undefined until its Region.Reusable says true; the next Redial sees to that, too. The
// error is
//   - ErrAlive while the session lives, ErrClosed after Close;
//   - ErrNotReusable when ctx ended and somebody may still write to a region, or at once where this
//     machine gives no proof (LeaseProof): then make new memory, and Dial;
//   - else ctx's error, joined with what the last try met, or a refusal that waiting cannot change.
func (c *Client) Redial(ctx context.Context) (*Client, error) {
	switch err := c.Err(); {
	case err == nil:
		return nil, fmt.Errorf("redial: %w", ErrAlive)
	case errors.Is(err, ErrClosed):
		return nil, fmt.Errorf("redial: %w", err)
	}
	regions, pools := c.memory()
	if err := leaseProof(); err != nil && len(regions) > 0 {
		return nil, fmt.Errorf("redial: %w: %w", ErrNotReusable, err)
	}
	for {
		n, err := c.follow(ctx, regions, pools)
		if err == nil {
			return n, nil
		}
		// The next engine may die, too, or its plugin while it takes the memory.
		var refused *Error
		again := errors.Is(err, ErrEngineLost) || errors.As(err, &refused) && refused.Code == "no_backend"
		if !again || sleep(ctx, redialLongest) != nil {
			return nil, fmt.Errorf("redial: %w", err)
		}
	}
}

// follow makes one session with the next engine, with all memory or not at all.
func (c *Client) follow(ctx context.Context, regions []*Region, pools []Pool) (*Client, error) {
	n, err := c.dialAgain(ctx)
	if err != nil {
		return nil, err
	}
	if err = await(ctx, c.fenced); err == nil {
		err = n.announce(ctx, regions, pools)
	}
	if err == nil && c.group != nil {
		c.group.follow(n)
	}
	if err != nil {
		n.Close()
		for _, r := range regions {
			r.Reusable() // where the proof is there already, the memory is as it was, too
		}
		return nil, err
	}
	return n, nil
}

// memory returns what the engine had taken and nobody closed since, in the order in which it did.
func (c *Client) memory() (regions []*Region, pools []Pool) {
	c.mu.Lock()
	ready := slices.Clone(c.ready)
	c.mu.Unlock()
	for _, r := range ready {
		r.mu.Lock()
		// One that is with a session that lives was given to it by hand.
		if !r.closed && (r.owner == c || r.owner.Err() != nil) {
			regions = append(regions, r)
		}
		r.mu.Unlock()
	}
	c.poolMu.Lock()
	defer c.poolMu.Unlock()
	return regions, slices.Clone(c.pools)
}

// dialAgain dials until an engine takes the worker, or refuses it for good.
func (c *Client) dialAgain(ctx context.Context) (*Client, error) {
	pause := redialPause
	for {
		n, err := Dial(ctx, c.options)
		if err == nil {
			return n, nil
		}
		var refused *Error
		if errors.As(err, &refused) && !refused.passing() {
			return nil, err
		}
		if e := sleep(ctx, pause); e != nil {
			return nil, errors.Join(e, err)
		}
		pause = min(2*pause, redialLongest)
	}
}

// passing reports whether a refused hello may be accepted a little later.
func (e *Error) passing() bool {
	return e.Code == "draining" || e.Code == "limit" || e.Code == "refused" && e.Field == "rank"
}

// announce hands the memory of an older session to this one.
func (c *Client) announce(ctx context.Context, regions []*Region, pools []Pool) error {
	for _, r := range regions {
		if err := await(ctx, r.Reusable); err != nil { // a failed Redial may have handed it out in between
			return err
		}
		if err := c.AddRegion(ctx, r); err != nil {
			return err
		}
	}
	for i, p := range pools {
		if _, err := c.AddPool(ctx, p); err != nil {
			return fmt.Errorf("pool %d of the old session: %w", i, err)
		}
	}
	return nil
}

// await looks until the proof is there: nobody wakes us when the last writer is gone.
func await(ctx context.Context, proven func() bool) error {
	pause := time.Millisecond
	for !proven() {
		if err := sleep(ctx, pause); err != nil {
			return fmt.Errorf("%w: somebody may still write to memory of the lost session: %w", ErrNotReusable, err)
		}
		pause = min(2*pause, 50*time.Millisecond)
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
