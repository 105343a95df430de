// SPDX-License-Identifier: Apache-2.0

package health

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
)

var noon = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

// well is a drive without any sign.
func well() Smart { return Smart{Celsius: 40, Spare: 100, SpareThreshold: 10, Used: 3} }

// read gives a record the reading of a log.
func read(r Record, s Smart, at time.Duration) Record {
	return r.Next(Reading{Smart: &s}, "", noon.Add(at))
}

func TestEachWarningOfALogMakesADriveSuspectWhileItLasts(t *testing.T) {
	for bit, want := range []string{
		"spare capacity", "temperature", "reliability", "read-only", "backup of its volatile memory", "persistent memory region", "bit 6", "bit 7",
	} {
		s := well()
		s.Warning = 1 << bit
		r := read(Record{}, s, 0)
		if !strings.Contains(r.Why(), want) || strings.Contains(r.Why(), ";") {
			t.Errorf("bit %d: %q, want only %q", bit, r.Why(), want)
		}
		if again := r.Next(Reading{Unread: "it does not answer"}, "", noon.Add(time.Hour)); again != r {
			t.Errorf("bit %d: a log that cannot be read changed the record to %+v", bit, again)
		}
		if r = read(r, well(), time.Minute); r.Why() != "" {
			t.Errorf("bit %d: after the warning has gone: %q", bit, r.Why())
		}
	}
}

func TestSpareBelowItsThresholdIsASignAndWearIsNone(t *testing.T) {
	for _, c := range []struct {
		spare, threshold, used int
		suspect                bool
	}{{10, 10, 3, false}, {9, 10, 3, true}, {0, 0, 3, false}, {100, 10, 100, false}, {100, 10, 255, false}} {
		s := well()
		s.Spare, s.SpareThreshold, s.Used = c.spare, c.threshold, c.used
		if got := read(Record{}, s, 0).Why() != ""; got != c.suspect {
			t.Errorf("spare %d%% of %d%%, used %d%%: suspect is %v, want %v", c.spare, c.threshold, c.used, got, c.suspect)
		}
	}
}

func TestMediaErrorsCountWhenTheyGrow(t *testing.T) {
	s := well()
	s.MediaErrors = 3
	r := read(Record{}, s, 0)
	if r.Why() != "" {
		t.Errorf("a drive that came with errors: %q", r.Why())
	}
	s.MediaErrors = 5
	r = read(r, s, time.Hour)
	if want := "its media and data integrity errors grew from 3 to 5"; r.Why() != want {
		t.Errorf("after two more: %q, want %q", r.Why(), want)
	}
	s.MediaErrors = 6
	r = read(r, s, 20*time.Hour)
	if want := "its media and data integrity errors grew from 3 to 6"; r.Why() != want {
		t.Errorf("after one more: %q, want %q", r.Why(), want)
	}
	if r = read(r, s, 43*time.Hour); r.Why() == "" {
		t.Error("23 hours after they last grew the drive is well")
	}
	if r = r.Next(Reading{}, "", noon.Add(44*time.Hour)); r.Why() != "" {
		t.Errorf("a day after they last grew: %q", r.Why())
	}
	s.MediaErrors = 1 // another drive, or other firmware
	if r = read(r, s, 45*time.Hour); r.Why() != "" {
		t.Errorf("a lower count: %q", r.Why())
	}
	s.MediaErrors = 2
	if r = read(r, s, 46*time.Hour); !strings.Contains(r.Why(), "from 1 to 2") {
		t.Errorf("one more than the lower count: %q", r.Why())
	}
}

func TestADriveThatIsSlowStaysSuspectForAWhile(t *testing.T) {
	r := Record{}.Next(Reading{}, "slow, 90 ms", noon)
	if r.Why() != "slow, 90 ms" {
		t.Errorf("an outlier: %q", r.Why())
	}
	if again := r.Next(Reading{}, "slow, 90 ms", noon.Add(time.Second)); again != r {
		t.Errorf("the same reading again changed the record to %+v", again)
	}
	r = r.Next(Reading{}, "slow, 70 ms", noon.Add(2*time.Minute))
	if r.Why() != "slow, 90 ms" {
		t.Errorf("two minutes later: %q, want the first figures", r.Why())
	}
	if r = r.Next(Reading{}, "", noon.Add(11*time.Minute)); r.Why() == "" {
		t.Error("9 minutes after it was last slow the drive is well")
	}
	if r = r.Next(Reading{}, "", noon.Add(12*time.Minute)); r != (Record{}) {
		t.Errorf("10 minutes after it was last slow: %+v", r)
	}
}

func TestTheRecordOutlivesTheManager(t *testing.T) {
	s := well()
	s.Warning, s.MediaErrors = 4, 1
	r := read(Record{Counted: true}, s, 0).Next(Reading{}, "slow", noon)
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var back Record
	if err := json.Unmarshal(text, &back); err != nil || back != r {
		t.Errorf("%s is read as %+v, %v, want %+v", text, back, err, r)
	}
	if next := read(back, s, time.Second); next != r {
		t.Errorf("the same reading after a restart changed the record to %+v", next)
	}
}

// timings are drives of one model with these mean times in milliseconds; 0: an idle drive.
func timings(model string, means ...int) (all []Timing) {
	for _, ms := range means {
		t := Timing{Model: model, IOs: 100, Bytes: 100 * 256 << 10, Latency: time.Duration(ms) * time.Millisecond}
		if ms == 0 {
			t.IOs = 99
		}
		all = append(all, t)
	}
	return all
}

func TestOnlyADriveFarBehindItsPeersIsAnOutlier(t *testing.T) {
	for what, c := range map[string]struct {
		all  []Timing
		want int // the index of the outlier; -1: none
	}{
		"five times as slow":        {timings("a", 5, 5, 25), -1},
		"more":                      {timings("a", 5, 5, 26), 2},
		"slow, but quick enough":    {timings("a", 1, 1, 20), -1},
		"just above 20 ms":          {timings("a", 1, 1, 21), 2},
		"all of them":               {timings("a", 90, 80, 100), -1},
		"one peer":                  {timings("a", 1, 90), -1},
		"idle peers":                {timings("a", 1, 0, 90), -1},
		"too few of its own":        {append(timings("a", 1, 1), Timing{"a", 99, 99, time.Second}), -1},
		"zeroing":                   {append(timings("a", 1, 1), Timing{"a", 100, 100*256<<10 + 100, time.Second}), -1},
		"peers of another model":    {append(timings("b", 1, 1), timings("a", 90, 1)...), -1},
		"models that are not known": {timings("", 1, 1, 90), -1},
		"of two peers, the slower":  {timings("a", 1, 20, 90), -1},
		"most are slow":             {timings("a", 1, 80, 80, 90), -1},
		"one slow peer of four":     {timings("a", 1, 1, 1, 6, 90), 4},
	} {
		for i, why := range Outliers(c.all) {
			if (why != "") != (i == c.want) {
				t.Errorf("%s: drive %d: %q", what, i, why)
			}
		}
	}
	if got, want := Outliers(timings("a", 4, 90, 4))[1], "its reads and writes took 90ms in a minute's mean, and the median of its 2 peers was 4ms"; got != want {
		t.Errorf("the reason is %q, want %q", got, want)
	}
}
