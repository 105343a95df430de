// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"weft.dev/weft/proto/access"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/replicated"
)

func members(voters, learners int) (all quorum.Members) {
	for i := range voters + learners {
		all = append(all, quorum.Member{ID: quorum.ID(i + 1), Address: fmt.Sprintf("m%d:1", i+1), Voter: i < voters})
	}
	return all
}

func near(ids ...quorum.ID) map[quorum.ID]quorum.Progress {
	all := map[quorum.ID]quorum.Progress{}
	for _, id := range ids {
		all[id] = quorum.Progress{Near: true}
	}
	return all
}

// An even number of voters is left as soon as possible, and entered only on the way to an odd one.
func TestWhichLearnersGetTheirVote(t *testing.T) {
	for _, c := range []struct {
		voters, learners int
		near             []quorum.ID
		want             string
	}{
		{1, 1, []quorum.ID{2}, "[]"},
		{1, 2, []quorum.ID{2}, "[]"},
		{1, 2, []quorum.ID{2, 3}, "[0000000000000002 0000000000000003]"},
		{2, 1, []quorum.ID{3}, "[0000000000000003]"},
		{2, 1, nil, "[]"},
		{2, 2, []quorum.ID{3, 4}, "[0000000000000003]"},
		{3, 1, []quorum.ID{4}, "[]"},
	} {
		if got := fmt.Sprint(promotable(members(c.voters, c.learners), near(c.near...))); got != c.want {
			t.Errorf("%d voters, %d learners, near %v: promoted are %v, want %v", c.voters, c.learners, c.near, got, c.want)
		}
	}
}

// A manager is not removed if too few of the others follow.
func TestWhichManagersCanBeRemoved(t *testing.T) {
	for _, c := range []struct {
		voters  int
		near    []quorum.ID
		removed quorum.ID
		able    bool
	}{
		{3, []quorum.ID{1, 2, 3}, 3, true},
		{3, []quorum.ID{1, 2}, 3, true},
		{3, []quorum.ID{1, 2}, 2, false},
		{2, []quorum.ID{1, 2}, 2, true},
		{5, []quorum.ID{1, 2, 3}, 5, true},
		{5, []quorum.ID{1, 2, 3}, 3, false},
	} {
		one, _ := members(c.voters, 0).Find(c.removed)
		if err := staysAble(members(c.voters, 0), one, near(c.near...)); (err == nil) != c.able {
			t.Errorf("%d voters, of which %v follow: removing %v = %v, want able %v", c.voters, c.near, c.removed, err, c.able)
		}
	}
	learner, _ := members(1, 1).Find(2)
	if err := staysAble(members(1, 1), learner, nil); err != nil {
		t.Errorf("removing a learner = %v", err)
	}
}

// A manager that replaces another one gets its vote only if those that follow are a majority then.
func TestWhichManagersMayReplaceAnother(t *testing.T) {
	for _, c := range []struct {
		voters int
		near   []quorum.ID
		able   bool
	}{
		{1, []quorum.ID{1}, true},
		{2, []quorum.ID{1, 2}, true},
		{3, []quorum.ID{1, 2, 3}, true},
		{3, []quorum.ID{1, 2}, true},
		{3, []quorum.ID{1}, false},
		{5, []quorum.ID{1, 2, 3}, true},
		{5, []quorum.ID{1, 2}, false},
	} {
		all := members(c.voters, 1)
		added, _ := all.Find(quorum.ID(c.voters + 1))
		if err := ableWith(all, added, near(c.near...)); (err == nil) != c.able {
			t.Errorf("%d voters, of which %v follow, and a new one = %v, want able %v", c.voters, c.near, err, c.able)
		}
	}
}

// A manager is named by its id, the beginning of it, or its address.
func TestHowAManagerIsNamed(t *testing.T) {
	all := quorum.Members{{ID: 0xab00000000000001, Address: "m1:1"}, {ID: 0xab00000000000002, Address: "m2:1"}, {ID: 0xcd00000000000003, Address: "m3:1"}}
	for _, c := range []struct {
		name string
		want quorum.ID
		err  string
	}{
		{"m2:1", all[1].ID, ""},
		{"cd", all[2].ID, ""},
		{"ab00000000000001", all[0].ID, ""},
		{"ab", 0, `manager "ab": 2 managers have ids that begin so`},
		{"x", 0, `manager "x": there is none with this id or address`},
		{"", 0, `manager "": there is none with this id or address`},
	} {
		got, err := memberNamed(all, c.name)
		if c.err == "" && (err != nil || got.ID != c.want) || c.err != "" && (err == nil || err.Error() != c.err) {
			t.Errorf("%q is %v, %v; want %v, %s", c.name, got.ID, err, c.want, c.err)
		}
	}
}

// startServed runs a manager that others reach over gRPC, at an address of the loopback interface.
func startServed(t *testing.T, dir string) (m *Manager, address string, stop func()) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address = listener.Addr().String()
	m, err = New(Config{Dir: dir, Quorum: &Quorum{Address: address, Dial: func(address string) (*grpc.ClientConn, error) {
		return grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	}}})
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	m.Register(server)
	go server.Serve(listener)
	stop = running(t, m, server.Stop)
	return m, address, stop
}

// running runs a manager until stop, or the end of the test.
func running(t *testing.T, m *Manager, afterwards func()) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() {
		if err := m.Run(ctx); err != nil && !errors.Is(err, replicated.ErrRemoved) {
			t.Error(err)
		}
	})
	stop = sync.OnceFunc(func() {
		cancel()
		group.Wait()
		afterwards()
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// Who adds and removes managers is in the audit like every other change. A certificate is for one
// manager: with a stolen one nobody becomes the majority.
func TestChangesOfManagersAreAudited(t *testing.T) {
	first, _, _ := startServed(t, initialized(t))
	register := func(r grpc.ServiceRegistrar) { first.Register(r) }
	stolen := pb.NewManagerClient(as(t, register, access.Identity{Kind: access.Node, Name: "m2", Role: access.Manager}))
	if _, err := stolen.AddManager(t.Context(), &pb.AddManagerRequest{Id: "0000000000000002", Address: "127.0.0.1:2"}); err != nil {
		t.Fatal(err)
	}
	if _, err := stolen.AddManager(t.Context(), &pb.AddManagerRequest{Id: "0000000000000003", Address: "127.0.0.1:3"}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("the same certificate becomes a second manager: %v", err)
	}
	conn := as(t, register, access.Identity{Kind: access.Person, Name: "ada", Role: access.Admin})
	if _, err := pb.NewManagerClient(conn).RemoveManager(t.Context(), &pb.RemoveManagerRequest{Manager: "0000000000000002"}); err != nil {
		t.Fatal(err)
	}
	list, err := pb.NewIdentitiesClient(conn).ListAudit(t.Context(), &pb.ListAuditRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range list.Entries {
		got = append(got, e.Who+" "+e.Call)
	}
	if want := []string{"node m2 (manager) AddManager", "person ada (admin) RemoveManager"}; !slices.Equal(got, want) {
		t.Errorf("the audit has %q, want %q", got, want)
	}
}

// startJoined runs a manager, and others that join it, and waits until all of them vote.
func startJoined(t *testing.T, others int) (all []*Manager) {
	t.Helper()
	first, _, _ := startServed(t, initialized(t))
	all = append(all, first)
	id := loadedID(t, &replica{Manager: first})
	for range others {
		dir := filepath.Join(t.TempDir(), "volmgr")
		member, err := Join(Config{Dir: dir}, id)
		if err != nil {
			t.Fatal(err)
		}
		m, address, _ := startServed(t, dir)
		if _, err := first.AddManager(t.Context(), &pb.AddManagerRequest{Id: member.String(), Address: address}); err != nil {
			t.Fatal(err)
		}
		all = append(all, m)
	}
	allVote(t, first, len(all))
	return all
}

// allVote waits until the manager that leads lists so many managers that vote and follow.
func allVote(t *testing.T, leader *Manager, count int) {
	t.Helper()
	eventually(t, "all vote and follow", func() bool {
		list, err := leader.ListManagers(t.Context(), &pb.ListManagersRequest{})
		votes := 0
		for _, one := range list.GetManagers() {
			if one.GetVoter() && one.GetRecorded() > 0 && one.GetProblem() == "" {
				votes++
			}
		}
		return err == nil && votes == count
	})
}

// askAll asks managers in turn until one of them carries a request out.
func askAll(t *testing.T, all []*Manager, ask func(*Manager) error) {
	t.Helper()
	eventually(t, "a manager does it", func() bool {
		return slices.ContainsFunc(all, func(m *Manager) bool { return ask(m) == nil })
	})
}

// The manager that leads is removed, again and again, until one is left, which goes on: a manager
// makes another one lead before it goes. Of two, the one that is left would otherwise wait for the
// vote of the one that is gone.
func TestTheManagerThatLeadsIsRemoved(t *testing.T) {
	all := startJoined(t, 2)
	for len(all) > 1 {
		i := -1
		eventually(t, "one leads", func() bool {
			i = slices.IndexFunc(all, func(m *Manager) bool { return m.quorum.Status().Role == quorum.Leader })
			return i >= 0
		})
		id := all[i].quorum.Status().ID
		askAll(t, all, func(m *Manager) error {
			_, err := m.RemoveManager(t.Context(), &pb.RemoveManagerRequest{Manager: id.String()})
			if status.Code(err) == codes.NotFound { // an attempt whose outcome was not known has removed it
				return nil
			}
			return err
		})
		all = slices.Delete(all, i, i+1)
		askAll(t, all, func(m *Manager) error {
			_, err := m.CreatePool(t.Context(), &pb.CreatePoolRequest{Name: fmt.Sprint("without-", id)})
			return err
		})
	}
}

// A manager that does not know who leads says nothing of who takes part: it may know an old list, or
// none.
func TestAManagerThatDoesNotLeadDoesNotSayWhoIsMissing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "volmgr")
	if _, err := Join(Config{Dir: dir}, block.ClusterID{UUID: newUUID()}); err != nil {
		t.Fatal(err)
	}
	m, _, _ := startServed(t, dir)
	_, err := m.RemoveManager(t.Context(), &pb.RemoveManagerRequest{Manager: "m9:1"})
	if _, notLeader := pb.NotLeader(err); !notLeader {
		t.Errorf("RemoveManager = %v, want that it does not lead", err)
	}
}

// A manager joins, follows and votes; it is listed, leads when it is told to, and is removed. When
// the majority is lost, the one that is left is the whole of a new quorum, with all records.
func TestTheManagersOfAClusterChange(t *testing.T) {
	dirs := []string{initialized(t)}
	first, _, stopFirst := startServed(t, dirs[0])
	if _, err := first.CreatePool(t.Context(), &pb.CreatePoolRequest{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	id := loadedID(t, &replica{Manager: first})
	all := []*Manager{first}
	stops := []func(){stopFirst}
	for range 2 {
		dir := filepath.Join(t.TempDir(), "volmgr")
		member, err := Join(Config{Dir: dir}, id)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := Join(Config{Dir: dir}, id); err != nil || again != member {
			t.Errorf("Join again = %v, %v; want %v", again, err, member)
		}
		m, address, stop := startServed(t, dir)
		for range 2 { // it may be repeated
			if _, err := first.AddManager(t.Context(), &pb.AddManagerRequest{Id: member.String(), Address: address}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := first.AddManager(t.Context(), &pb.AddManagerRequest{Id: "0000000000000001", Address: address}); err == nil {
			t.Error("two managers have one address")
		}
		all, dirs, stops = append(all, m), append(dirs, dir), append(stops, stop)
	}
	allVote(t, first, 3)
	if _, err := Join(Config{Dir: filepath.Dir(dirs[1])}, id); !errors.Is(err, ErrNotEmpty) {
		t.Errorf("Join in a directory with something else = %v, want %v", err, ErrNotEmpty)
	}
	if _, err := Join(Config{Dir: dirs[1]}, id); !errors.Is(err, replicated.ErrTaken) {
		t.Errorf("Join with the store of a manager = %v, want %v", err, replicated.ErrTaken)
	}

	second := all[1].quorum.Status().ID
	if _, err := first.TransferLeadership(t.Context(), &pb.TransferLeadershipRequest{Manager: second.String()}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the second one leads", func() bool { return all[1].quorum.Status().Role == quorum.Leader })
	if _, err := first.ListManagers(t.Context(), &pb.ListManagersRequest{}); err == nil || !strings.Contains(err.Error(), " does") {
		t.Errorf("a follower lists %v, want who leads", err)
	}
	stops[0]()
	if _, err := all[1].CreatePool(t.Context(), &pb.CreatePoolRequest{Name: "silver"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the loss is known", func() bool {
		list, err := all[1].ListManagers(t.Context(), &pb.ListManagersRequest{})
		return err == nil && slices.ContainsFunc(list.GetManagers(), func(one *pb.ManagerMember) bool { return one.GetProblem() != "" })
	})
	if status, err := all[1].GetStatus(t.Context(), &pb.GetStatusRequest{}); err != nil || !strings.Contains(fmt.Sprint(status.GetWrong()), " does not answer: ") {
		t.Errorf("the status says %v, %v; want that a manager does not answer", status.GetWrong(), err)
	}
	if _, err := all[1].RemoveManager(t.Context(), &pb.RemoveManagerRequest{Manager: all[2].quorum.Status().ID.String()}); err == nil {
		t.Error("a manager is removed whose loss leaves no majority")
	}
	if err := all[1].HandOver(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the third one leads", func() bool { return all[2].quorum.Status().Role == quorum.Leader })
	if err := all[1].HandOver(t.Context()); err != nil {
		t.Errorf("HandOver of one that does not lead = %v", err)
	}
	stops[1]() // and the majority is lost
	if err := all[2].HandOver(t.Context()); err != nil && !errors.Is(err, quorum.ErrBusy) {
		t.Errorf("HandOver while nobody else is there = %v", err)
	}
	eventually(t, "the last one has all", func() bool {
		return all[2].quorum.Status().Applied.Index > 0
	})
	stops[2]()
	recoverLast(t, dirs[2])
}

func recoverLast(t *testing.T, from string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "recovered")
	survivor, err := Recover(Config{Dir: dir}, from)
	if err != nil || len(survivor.Members) != 3 {
		t.Fatalf("Recover = %v, %v; want a survivor of three", survivor.Members, err)
	}
	if _, err := Recover(Config{Dir: dir}, from); !errors.Is(err, ErrNotEmpty) {
		t.Errorf("Recover into a directory that is not empty = %v", err)
	}
	if _, err := Recover(Config{Dir: dir + "2"}, initialized(t)); err == nil {
		t.Error("a store without a quorum is recovered")
	}
	m, _, _ := startServed(t, dir)
	names := fmt.Sprint(pools(t, &replica{Manager: m}))
	if !strings.Contains(names, "gold") || !strings.Contains(names, "silver") {
		t.Errorf("the recovered manager has the pools %s", names)
	}
	records, err := m.quorum.Load()
	if err != nil {
		t.Fatal(err)
	}
	if state, err := cluster.Load(records); err != nil || state.Term() < 1000 {
		t.Errorf("the recovered manager's term is %d, %v; want one far above", state.Term(), err)
	}
}
