// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// structure is one data structure: how to parse its bytes, and how to append the parsed
// value.
type structure struct {
	name string
	size int // the shortest input that parses
	read func(b []byte) (value any, again []byte, err error)
}

func of[T any](name string, size int, parse func([]byte) (T, error), add func(T) []byte) structure {
	return structure{name, size, func(b []byte) (any, []byte, error) {
		v, err := parse(b)
		if err != nil {
			return nil, nil, err
		}
		return v, add(v), nil
	}}
}

// commandOf is a structure that is a command, with data behind it if data is not 0.
func commandOf[T any](name string, data int, parse func(*Command, []byte) (T, error), add func(T) (Command, []byte)) structure {
	return of(name, CommandSize+data, func(b []byte) (T, error) {
		if len(b) < CommandSize {
			var none T
			return none, short("command", len(b), CommandSize)
		}
		return parse((*Command)(b[:CommandSize]), b[CommandSize:])
	}, func(v T) []byte {
		c, data := add(v)
		return append(c[:], data...)
	})
}

func plain[T any](parse func(*Command) T) func(*Command, []byte) (T, error) {
	return func(c *Command, _ []byte) (T, error) { return parse(c), nil }
}

func noMore[T any](command func(T) Command) func(T) (Command, []byte) {
	return func(v T) (Command, []byte) { return command(v), nil }
}

func word[T any](name string, parse func(uint64) T, encode func(T) uint64) structure {
	return of(name, 8, func(b []byte) (T, error) {
		if len(b) < 8 {
			var none T
			return none, short("word", len(b), 8)
		}
		return parse(le.Uint64(b)), nil
	}, func(v T) []byte { return le.AppendUint64(nil, encode(v)) })
}

func word32[T any](name string, parse func(uint32) T, encode func(T) uint32) structure {
	return word(name, func(v uint64) T { return parse(uint32(v)) }, func(v T) uint64 { return uint64(encode(v)) })
}

type rangeList []Range

type report struct {
	ReservationStatus
	extended bool
}

func reportOf(extended bool, size int) structure {
	return of(fmt.Sprintf("ReservationStatus extended=%v", extended), size, func(b []byte) (report, error) {
		s, _, err := ParseReservationStatus(b, extended)
		return report{s, extended}, err
	}, func(r report) []byte { return r.Append(nil, r.extended) })
}

var pduStructures = []structure{
	of("Header", 8, ParseHeader, func(v Header) []byte { return v.Append(nil) }),
	of("ICReq", ICSize, ParseICReq, func(v ICReq) []byte { return v.Append(nil) }),
	of("ICResp", ICSize, ParseICResp, func(v ICResp) []byte { return v.Append(nil) }),
	of("TermReq", TermReqSize, ParseTermReq, func(v TermReq) []byte { return v.Append(nil) }),
	of("DataHeader", DataHeaderSize, ParseDataHeader, func(v DataHeader) []byte { return v.Append(make([]byte, 8)) }),
}

var fabricsStructures = []structure{
	commandOf("Connect", 0, plain(ParseConnect), noMore(Connect.Command)),
	of("ConnectData", ConnectDataSize, ParseConnectData, func(v ConnectData) []byte { return v.Append(nil) }),
	word("ConnectResult", ParseConnectResult, ConnectResult.Encode),
	commandOf("AuthCommand", 0, plain(ParseAuthCommand), func(v AuthCommand) (Command, []byte) { return v.Command(false), nil }),
	commandOf("PropertySet", 0, plain(ParseProperty), func(v PropertyAccess) (Command, []byte) {
		if v.Property.Size() == 4 {
			v.Value &= 0xffffffff // the property's size limits what is written
		}
		return PropertySetCommand(v.Property, v.Value), nil
	}),
	word("Capabilities", ParseCapabilities, Capabilities.Encode),
	word32("Configuration", ParseConfiguration, Configuration.Encode),
	word32("ControllerStatus", ParseControllerStatus, ControllerStatus.Encode),
}

var identifyStructures = []structure{
	commandOf("Identify", 0, plain(ParseIdentify), noMore(Identify.Command)),
	of("Controller", IdentifySize, ParseController, func(v Controller) []byte { return v.Append(nil) }),
	of("NVMController", IdentifySize, ParseNVMController, func(v NVMController) []byte { return v.Append(nil) }),
	of("Namespace", IdentifySize, ParseNamespace, func(v Namespace) []byte { return v.Append(nil) }),
	of("IndependentNamespace", IdentifySize, ParseIndependentNamespace, func(v IndependentNamespace) []byte { return v.Append(nil) }),
	of("NamespaceList", IdentifySize, ParseNamespaceList, func(v []uint32) []byte { return AppendNamespaceList(nil, v) }),
	of("ControllerList", IdentifySize, ParseControllerList, func(v []uint16) []byte { return AppendControllerList(nil, v) }),
	of("Descriptors", IdentifySize, ParseDescriptors, func(v Descriptors) []byte { return v.Append(nil) }),
	of("CommandSets", IdentifySize, ParseCommandSets, func(v []uint64) []byte { return AppendCommandSets(nil, v) }),
}

var logStructures = []structure{
	commandOf("GetLog", 0, plain(ParseGetLog), noMore(GetLog.Command)),
	of("ErrorEntry", ErrorEntrySize, ParseErrorEntry, func(v ErrorEntry) []byte { return v.Append(nil) }),
	of("Smart", SmartSize, ParseSmart, func(v Smart) []byte { return v.Append(nil) }),
	of("Firmware", FirmwareSize, ParseFirmware, func(v Firmware) []byte { return v.Append(nil) }),
	of("ChangedNamespaces", ChangedNamespacesSize, ParseChangedNamespaces, func(v ChangedNamespaces) []byte { return v.Append(nil) }),
	of("Effects", EffectsSize, ParseEffects, func(v Effects) []byte { return v.Append(nil) }),
	of("SupportedLogs", SupportedLogsSize, ParseSupportedLogs, func(v SupportedLogs) []byte { return v.Append(nil) }),
	of("ANALog", anaHeaderSize, ParseANALog, func(v ANALog) []byte { return v.Append(nil) }),
	of("DiscoveryLog", DiscoveryEntrySize, ParseDiscoveryLog, func(v DiscoveryLog) []byte { v.Records = uint64(len(v.Entries)); return v.Append(nil) }),
	commandOf("Checkpoint", 0, plain(ParseCheckpoint), noMore(Checkpoint.Command)),
	of("Behind", behindHeaderSize, ParseBehind, func(v Behind) []byte { return v.Append(nil) }),
	commandOf("GetLBAStatus", 0, plain(ParseGetLBAStatus), noMore(GetLBAStatus.Command)),
	commandOf("GetDifferences", 0, plain(ParseGetDifferences), noMore(GetDifferences.Command)),
	of("LBAStatusList", LBAStatusHeaderSize, ParseLBAStatusList, func(v LBAStatusList) []byte { return v.Append(nil) }),
	of("WrittenLog", WrittenHeaderSize, ParseWrittenLog, func(v WrittenLog) []byte { return v.Append(nil) }),
	of("ReservationNotice", ReservationNotifySize, ParseReservationNotice, func(v ReservationNotice) []byte { return v.Append(nil) }),
}

var ioStructures = []structure{
	commandOf("GetFeatures", 0, plain(ParseFeature), noMore(FeatureAccess.GetCommand)),
	commandOf("SetFeatures", 0, plain(ParseFeature), noMore(FeatureAccess.SetCommand)),
	word32("QueueCounts", ParseQueueCounts, QueueCounts.Encode),
	word32("Event", ParseEvent, Event.Encode),
	of("ranges", 1, func(b []byte) (rangeList, error) {
		if len(b) == 0 {
			return nil, short("ranges", 0, 1)
		}
		return ParseRanges(b[1:], int(b[0]))
	}, func(v rangeList) []byte {
		b := []byte{byte(len(v))}
		for _, r := range v {
			b = r.Append(b)
		}
		return b
	}),
	commandOf("ReservationRegister", ReservationRegisterSize, ParseReservationRegister, func(v ReservationRegister) (Command, []byte) { return v.Command(1) }),
	commandOf("ReservationAcquire", ReservationAcquireSize, ParseReservationAcquire, func(v ReservationAcquire) (Command, []byte) { return v.Command(1) }),
	commandOf("ReservationRelease", ReservationReleaseSize, ParseReservationRelease, func(v ReservationRelease) (Command, []byte) { return v.Command(1) }),
	commandOf("ReservationReport", 0, plain(ParseReservationReport), noMore(ReservationReport.Command)),
	reportOf(false, reservationHeaderSize),
	reportOf(true, reservationExtendedHeaderSize),
}

func everyStructure() []structure {
	var all []structure
	for _, s := range [][]structure{pduStructures, fabricsStructures, identifyStructures, logStructures, ioStructures} {
		all = append(all, s...)
	}
	return all
}

// stable checks that parsing b, appending the value, and parsing that gives the same value.
func stable(t *testing.T, s structure, b []byte) {
	t.Helper()
	v, once, err := s.read(b)
	if err != nil {
		return
	}
	w, twice, err := s.read(once)
	if err != nil {
		t.Fatalf("%s: cannot parse the encoding of %+v: %v", s.name, v, err)
	}
	if !bytes.Equal(once, twice) {
		t.Fatalf("%s: the encodings of %+v and %+v differ", s.name, v, w)
	}
}

func TestWhatIsWrittenReadsTheSame(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	for _, s := range everyStructure() {
		for range 200 {
			b := make([]byte, s.size+r.IntN(300))
			for i := range b {
				if r.IntN(4) > 0 { // zeroes end names and lists
					b[i] = byte(r.Uint32())
				}
			}
			stable(t, s, b)
		}
	}
}

func TestNothingIsReadOfTooFewBytes(t *testing.T) {
	for _, s := range everyStructure() {
		for _, n := range []int{0, s.size / 2, s.size - 1} {
			if _, _, err := s.read(make([]byte, n)); err == nil {
				t.Errorf("%s was parsed from %d bytes", s.name, n)
			}
		}
	}
}

// full sets every field of a struct to a nonzero value.
func full(v reflect.Value, n *uint64) {
	*n++
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			full(v.Field(i), n)
		}
	case reflect.Array:
		for i := range v.Len() {
			full(v.Index(i), n)
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		full(v.Index(0), n)
		full(v.Index(1), n)
	case reflect.String:
		v.SetString(fmt.Sprintf("text%d", *n%1000))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint8:
		v.SetUint(*n%200 + 1)
	default:
		v.SetUint(*n)
	}
}

func TestNoFieldIsLost(t *testing.T) {
	check := func(name string, want, got any, err error) {
		t.Helper()
		if err != nil || !reflect.DeepEqual(want, got) {
			t.Errorf("%s: %v\nwant %+v\ngot  %+v", name, err, want, got)
		}
	}
	n := uint64(0)
	var c Controller
	full(reflect.ValueOf(&c).Elem(), &n)
	got, err := ParseController(c.Append(nil))
	check("Controller", c, got, err)

	var nv NVMController
	full(reflect.ValueOf(&nv).Elem(), &n)
	gotNVM, err := ParseNVMController(nv.Append(nil))
	check("NVMController", nv, gotNVM, err)

	var ns Namespace
	full(reflect.ValueOf(&ns).Elem(), &n)
	ns.FormatIndex, ns.DeallocatedReads = 37, 1
	ns.Formats = []LBAFormat{{0, 9, 3}, {8, 12, 1}, {0, 12, 0}}
	gotNS, err := ParseNamespace(ns.Append(nil))
	check("Namespace", ns, gotNS, err)

	var in IndependentNamespace
	full(reflect.ValueOf(&in).Elem(), &n)
	gotIn, err := ParseIndependentNamespace(in.Append(nil))
	check("IndependentNamespace", in, gotIn, err)

	var d Descriptors
	full(reflect.ValueOf(&d).Elem(), &n)
	gotD, err := ParseDescriptors(d.Append(nil))
	check("Descriptors", d, gotD, err)

	var smart Smart
	full(reflect.ValueOf(&smart).Elem(), &n)
	gotSmart, err := ParseSmart(smart.Append(nil))
	check("Smart", smart, gotSmart, err)

	var e ErrorEntry
	full(reflect.ValueOf(&e).Elem(), &n)
	gotE, err := ParseErrorEntry(e.Append(nil))
	check("ErrorEntry", e, gotE, err)

	f := Firmware{Active: 1, Next: 2, Slots: [7]string{"1.0", "", "2.0"}}
	gotF, err := ParseFirmware(f.Append(nil))
	check("Firmware", f, gotF, err)

	log := DiscoveryLog{Generation: 9, Records: 2, Entries: make([]DiscoveryEntry, 2)}
	for i := range log.Entries {
		full(reflect.ValueOf(&log.Entries[i]).Elem(), &n)
	}
	gotLog, err := ParseDiscoveryLog(log.Append(nil))
	check("DiscoveryLog", log, gotLog, err)

	ana := ANALog{Changes: 4, Groups: []ANAGroup{{ID: 1, Changes: 2, State: ANAStateOptimized, Namespaces: []uint32{1, 5}}, {ID: 2, State: ANAStateChange}}}
	gotANA, err := ParseANALog(ana.Append(nil))
	check("ANALog", ana, gotANA, err)

	changed := ChangedNamespaces{IDs: []uint32{1, 2, 9}}
	gotChanged, err := ParseChangedNamespaces(changed.Append(nil))
	check("ChangedNamespaces", changed, gotChanged, err)

	connect := Connect{QueueID: 3, QueueSize: 65536, Attributes: ConnectNoFlowControl, KATO: 5 * time.Second}
	cmd := connect.Command()
	check("Connect", connect, ParseConnect(&cmd), nil)

	data := ConnectData{HostID: block.UUID{1, 2}, ControllerID: 7, Subsystem: "nqn.2026-11.dev.weft:x", Host: "nqn.2014-08.org.nvmexpress:uuid:y"}
	gotData, err := ParseConnectData(data.Append(nil))
	check("ConnectData", data, gotData, err)

	get := GetLog{ID: LogANA, NSID: 4, Specific: ANAGroupsOnly, RetainEvent: true, Length: 1 << 20, Offset: 1 << 33, IndexOffset: true, CommandSet: 2}
	cmd = get.Command()
	check("GetLog", get, ParseGetLog(&cmd), nil)

	id := Identify{CNS: CNSDescriptors, NSID: 77, ControllerID: 5, CommandSet: 3}
	cmd = id.Command()
	check("Identify", id, ParseIdentify(&cmd), nil)

	for _, extended := range []bool{false, true} {
		status := ReservationStatus{Generation: 5, Type: WriteExclusive, Persists: true, Registrants: []Registrant{
			{ControllerID: 3, Holder: true, HostID: block.UUID{1, 2, 3}, Key: 9}, {ControllerID: 4, Key: 10}}}
		gotStatus, total, err := ParseReservationStatus(status.Append(nil, extended), extended)
		check("ReservationStatus", status, gotStatus, err)
		if total != 2 {
			t.Errorf("ReservationStatus of %d", total)
		}
	}
	register := ReservationRegister{Action: ReplaceKey, IgnoreKey: true, Persist: PersistOn, Current: 1, New: 2}
	cmd, raw := register.Command(1)
	gotRegister, err := ParseReservationRegister(&cmd, raw)
	check("ReservationRegister", register, gotRegister, err)
	acquire := ReservationAcquire{Action: PreemptAndAbort, IgnoreKey: true, Type: ExclusiveAccess, Current: 1, Preempt: 2}
	cmd, raw = acquire.Command(1)
	gotAcquire, err := ParseReservationAcquire(&cmd, raw)
	check("ReservationAcquire", acquire, gotAcquire, err)
	release := ReservationRelease{Action: Clear, IgnoreKey: true, Type: ExclusiveAccess, Current: 1}
	cmd, raw = release.Command(1)
	gotRelease, err := ParseReservationRelease(&cmd, raw)
	check("ReservationRelease", release, gotRelease, err)
}

// TestFieldsAreWhereTheSpecificationHasThem compares with offsets taken from the figures of
// the specifications, not from the code.
func TestFieldsAreWhereTheSpecificationHasThem(t *testing.T) {
	connect := Connect{QueueID: 0x1234, QueueSize: 0x80, Attributes: 4, KATO: 0x3039 * time.Millisecond}.Command()
	data := ConnectData{ControllerID: 0xffff, Subsystem: "sub", Host: "host"}.Append(nil)
	var rw Command
	rw.SetOpcode(IOWrite)
	rw.SetCID(0xbeef)
	rw.SetNSID(0x01020304)
	rw.SetSLBA(0x1122334455667788)
	rw.SetBlocks(8)
	rw.SetFUA()
	rw.SetSGL(Transport(4096))
	var cqe Completion
	cqe.SetCID(0x0708)
	cqe.SetSQHead(0x0506)
	cqe.SetStatus(InvalidField | DNR)
	controller := Controller{MDTS: 5, Version: 0x20000, Type: ControllerIO, KeepAliveGranularity: 10, SQES: 0x66, CQES: 0x44,
		Namespaces: 1024, ONCS: 0x0c, SGLS: 0x300001, Subsystem: "sub", IOCapsule: 516, IOResponse: 1, MSDBD: 1, ANAGroupMax: 128, PerHost: 1, Replacer: true}
	namespace := Namespace{Size: 0x10000, Shared: true, ANAGroup: 1, NGUID: [16]byte{0xaa}, Formats: []LBAFormat{{BlockShift: 12}}}
	entry := DiscoveryEntry{Transport: TransportTCP, Family: FamilyIPv4, Type: SubsystemNVM, PortID: 1, ControllerID: 0xffff,
		AdminQueue: 32, Service: "4420", Subsystem: "sub", Address: "192.0.2.1", Security: 2}
	for _, c := range []struct {
		what string
		in   []byte
		at   int
		want []byte
	}{
		{"Connect opcode, PSDT", connect[:], 0, []byte{0x7f, 0x40}},
		{"Connect FCTYPE", connect[:], 4, []byte{1}},
		{"Connect SGL", connect[:], 24, []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 1}},
		{"Connect QID", connect[:], 42, []byte{0x34, 0x12}},
		{"Connect SQSIZE", connect[:], 44, []byte{0x7f, 0}},
		{"Connect CATTR", connect[:], 46, []byte{4}},
		{"Connect KATO", connect[:], 48, []byte{0x39, 0x30, 0, 0}},
		{"Connect CNTLID", data, 16, []byte{0xff, 0xff}},
		{"Connect SUBNQN", data, 256, []byte("sub\x00")},
		{"Connect HOSTNQN", data, 512, []byte("host\x00")},
		{"Write", rw[:], 0, []byte{1, 0x40, 0xef, 0xbe, 4, 3, 2, 1}},
		{"Write SGL", rw[:], 32, []byte{0, 0x10, 0, 0, 0, 0, 0, 0x5a}},
		{"Write SLBA", rw[:], 40, []byte{0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11}},
		{"Write NLB, FUA", rw[:], 48, []byte{7, 0, 0, 0x40}},
		{"completion", cqe[:], 8, []byte{6, 5, 0, 0, 8, 7, 4, 0x80}},
		{"MDTS", controller.Append(nil), 77, []byte{5}},
		{"Weft's mark, PerHost and Replacer", controller.Append(nil), 3072, []byte("weft\x01\x00\x01")},
		{"VER", controller.Append(nil), 80, []byte{0, 0, 2, 0}},
		{"CNTRLTYPE", controller.Append(nil), 111, []byte{1}},
		{"KAS", controller.Append(nil), 320, []byte{10, 0}},
		{"ANAGRPMAX", controller.Append(nil), 344, []byte{128, 0, 0, 0}},
		{"SQES, CQES", controller.Append(nil), 512, []byte{0x66, 0x44}},
		{"NN", controller.Append(nil), 516, []byte{0, 4, 0, 0}},
		{"ONCS", controller.Append(nil), 520, []byte{0x0c, 0}},
		{"SGLS", controller.Append(nil), 536, []byte{1, 0, 0x30, 0}},
		{"SUBNQN", controller.Append(nil), 768, []byte("sub\x00")},
		{"IOCCSZ, IORCSZ, ICDOFF", controller.Append(nil), 1792, []byte{4, 2, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1}},
		{"NSZE", namespace.Append(nil), 0, []byte{0, 0, 1, 0}},
		{"NMIC", namespace.Append(nil), 30, []byte{1}},
		{"ANAGRPID", namespace.Append(nil), 92, []byte{1, 0, 0, 0}},
		{"NGUID", namespace.Append(nil), 104, []byte{0xaa}},
		{"LBAF0", namespace.Append(nil), 128, []byte{0, 0, 12, 0}},
		{"discovery entry", entry.Append(nil), 0, []byte{3, 1, 2, 0, 1, 0, 0xff, 0xff, 32, 0}},
		{"TRSVCID", entry.Append(nil), 32, []byte("4420 ")},
		{"discovery SUBNQN", entry.Append(nil), 256, []byte("sub\x00")},
		{"TRADDR", entry.Append(nil), 512, []byte("192.0.2.1 ")},
		{"TSAS", entry.Append(nil), 768, []byte{2}},
		{"ICReq", ICReq{HPDA: 3, DataDigest: true, MaxR2T: 1}.Append(nil), 0, []byte{0, 0, 128, 0, 128, 0, 0, 0, 0, 0, 3, 2, 0, 0, 0, 0}},
		{"ICResp", ICResp{CPDA: 3, HeaderDigest: true, MaxH2CData: 0x20000}.Append(nil), 0, []byte{1, 0, 128, 0, 128, 0, 0, 0, 0, 0, 3, 1, 0, 0, 2, 0}},
		{"C2HTermReq", TermReq{ToHost: true, FES: FESLimitExceeded, FEI: 0x01020304, Header: []byte{9}}.Append(nil), 0,
			[]byte{3, 0, 24, 0, 25, 0, 0, 0, 5, 0, 4, 3, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9}},
		{"event", binary.LittleEndian.AppendUint32(nil, Event{EventTypeNotice, NoticeANA, LogANA}.Encode()), 0, []byte{2, 3, 0x0c, 0}},
	} {
		if got := c.in[c.at:min(c.at+len(c.want), len(c.in))]; !bytes.Equal(got, c.want) {
			t.Errorf("%s at %d: % x, not % x", c.what, c.at, got, c.want)
		}
	}
}

func TestDigestIsCRC32C(t *testing.T) {
	// RFC 3720, B.4.
	zeroes, ones := make([]byte, 32), bytes.Repeat([]byte{0xff}, 32)
	if Digest(zeroes) != 0x8a9136aa || Digest(ones) != 0x62a8ab43 {
		t.Fatalf("%#x %#x", Digest(zeroes), Digest(ones))
	}
	if UpdateDigest(Digest(ones[:5]), ones[5:]) != Digest(ones) {
		t.Fatal("a digest in two parts differs")
	}
}
