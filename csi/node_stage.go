// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/csi/mount"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// staging is a request to stage a volume.
type staging struct {
	wanted
	volume      string
	path        string
	publication publication
}

// NodeStageVolume mounts a volume's file system at the staging path; on a new volume it first makes
// one (see format.go). For a raw block volume it only checks that the device exists and can be
// read.
func (s *nodeServer) NodeStageVolume(ctx context.Context, r *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	req, err := s.parseStaging(r)
	if err != nil {
		return nil, err
	}
	err = s.run(ctx, req.volume, "NodeStageVolume", func(ctx context.Context, t *task) error {
		return s.stage(ctx, t, req)
	})
	if err != nil {
		return nil, err
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

func (s *nodeServer) parseStaging(r *csi.NodeStageVolumeRequest) (req staging, err error) {
	if err = missingID(r.GetVolumeId()); err != nil {
		return req, err
	}
	if err = s.checkPath("staging_target_path", r.GetStagingTargetPath()); err != nil {
		return req, err
	}
	req = staging{volume: r.GetVolumeId(), path: r.GetStagingTargetPath()}
	if req.wanted, err = parseWanted(r.GetVolumeCapability(), r.GetVolumeContext()); err != nil {
		return req, err
	}
	if req.publication, err = parsePublication(r.GetPublishContext()); err != nil {
		return req, status.Error(codes.InvalidArgument, err.Error())
	}
	if req.publication.mode == pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY && !req.shared() {
		// The controller attaches a sealed volume so, whatever its claim is for.
		req.mode, req.readOnly, req.sealed = req.publication.mode, true, true
	}
	if req.publication.mode != req.mode {
		return req, status.Errorf(codes.InvalidArgument, "volume_capability: needs the volume attached as %s, but it was published as %s", modeText(req.mode), modeText(req.publication.mode))
	}
	return req, nil
}

func (s *nodeServer) stage(ctx context.Context, t *task, req staging) error {
	a, err := s.attached(ctx, t, req.volume, req.publication)
	if err != nil {
		return err
	}
	path, err := s.kernel.Resolve(req.path)
	if err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	if err := t.next(ctx, "open %s", a.Device); err != nil {
		return err
	}
	d, err := s.open(ctx, a)
	if err != nil {
		return err
	}
	defer d.Close()
	m, mounted, err := s.current(ctx, t, a, path)
	if err != nil {
		return err
	}
	switch {
	case req.block && mounted:
		return status.Errorf(codes.AlreadyExists, "volume %s: it is staged as a file system, but requested as a raw device", a.volume.Name)
	case req.block:
		if _, err := mount.Inspect(s.kernel, d); err != nil {
			return unavailable(a, err)
		}
		return s.recordRaw(ctx, a, req.wanted)
	case mounted:
		return s.stagedAlready(ctx, t, a, d, req, m)
	}
	return s.mount(ctx, t, a, d, req, path)
}

// unavailable is the answer to an error of the device or the kernel after which everything can be
// retried.
func unavailable(a attachment, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	return status.Errorf(codes.Unavailable, "volume %s: %v", a.volume.Name, err)
}

// current finds the mount of an attachment's device at a path. It removes mounts of an earlier
// attachment's device.
func (s *nodeServer) current(ctx context.Context, t *task, a attachment, path string) (m mount.Mount, mounted bool, err error) {
	for {
		all, err := s.kernel.Mounts()
		if err != nil {
			return m, false, unavailable(a, err)
		}
		m, mounted = all.At(path)
		if !mounted {
			return m, false, nil
		}
		if s.deviceOf(m) == a.number {
			return m, true, nil
		}
		if err := s.clear(ctx, t, a, m); err != nil {
			return m, false, err
		}
	}
}

// deviceOf is the device that a mount provides: its file system's, or the one whose node is
// mounted.
func (s *nodeServer) deviceOf(m mount.Mount) block.DeviceNumber {
	if m.MayBeNode() {
		if node, ok := s.kernel.Node(m.Point); ok {
			return node
		}
	}
	return m.Device
}

// clear unmounts what an earlier attachment of the volume left. Its device no longer reaches the
// volume: its users already get errors, so it may be detached under them.
func (s *nodeServer) clear(ctx context.Context, t *task, a attachment, m mount.Mount) error {
	inUse := status.Errorf(codes.FailedPrecondition, "volume %s: %s is on %s, which is not the volume's device %s", a.volume.Name, m.Source, m.Point, a.number)
	device := s.deviceOf(m)
	if device == m.Device && filepath.Dir(m.Source) != filepath.Dir(a.Device) {
		return inUse
	}
	others, err := s.cfg.Manager.ListAttachments(ctx, &pb.ListAttachmentsRequest{Node: string(s.cfg.Node)})
	if err != nil {
		return fromManager("look up the attachments of this node", err)
	}
	for _, o := range others.Attachments {
		if o.DeviceNumber == device.String() {
			return inUse
		}
	}
	if err := t.next(ctx, "unmount %s of an earlier attachment", m.Point); err != nil {
		return err
	}
	err = s.kernel.Unmount(m.Point, false)
	if errors.Is(err, unix.EBUSY) {
		err = s.kernel.Unmount(m.Point, true)
	}
	return unavailable(a, err)
}

// stagedAlready answers for a staging path that already has the volume's file system: with an error
// if that differs from the request.
func (s *nodeServer) stagedAlready(ctx context.Context, t *task, a attachment, d mount.Disk, req staging, m mount.Mount) error {
	differs := func(what, is, asked string) error {
		return status.Errorf(codes.AlreadyExists, "volume %s: it is staged with %s %s, not %s as requested", a.volume.Name, what, is, asked)
	}
	options, err := mountOptions(m.FSType, req.flags, req.readOnly)
	switch {
	case err != nil:
		return err
	case req.fsType != "" && req.fsType != m.FSType:
		return differs("file system", m.FSType, req.fsType)
	case !mount.SameOptions(m, options):
		return differs("options", strings.Join(mount.IdentityOf(m), ","), strings.Join(mount.Identity(options), ","))
	case req.readOnly:
		return nil
	}
	return s.stagedLarger(ctx, t, a, d, m.FSType, m.Point)
}

// mount prepares the device and mounts it.
func (s *nodeServer) mount(ctx context.Context, t *task, a attachment, d mount.Disk, req staging, path string) error {
	if err := checkShared(a, d, req); err != nil {
		return err
	}
	fsType, err := s.prepare(ctx, t, a, d, req)
	if err != nil {
		return err
	}
	options, err := mountOptions(fsType, req.flags, req.readOnly)
	if err != nil {
		return err
	}
	if err := t.next(ctx, "mount %s of %s on %s", fsType, a.Device, path); err != nil {
		return err
	}
	if err := s.kernel.MakeDir(path); err != nil {
		return noPlace(a, err)
	}
	if err := s.kernel.Mount(d, a.Device, path, fsType, options); err != nil {
		return mountFailed(a, err)
	}
	all, err := s.kernel.Mounts()
	if err != nil {
		return unavailable(a, err)
	}
	if m, ok := all.At(path); !ok || m.Device != a.number {
		return unavailable(a, errors.Join(fmt.Errorf("%s has device %s after the mount, not %s", path, m.Device, a.number), s.kernel.Unmount(path, false)))
	}
	if req.readOnly {
		return nil
	}
	return s.stagedLarger(ctx, t, a, d, fsType, path)
}

// noPlace recognizes a path on which the volume cannot be mounted, whoever made it.
func noPlace(a attachment, err error) error {
	for _, odd := range []error{unix.ELOOP, unix.ENOTDIR, unix.EISDIR} {
		if errors.Is(err, odd) {
			return status.Errorf(codes.FailedPrecondition, "volume %s: %v", a.volume.Name, err)
		}
	}
	return unavailable(a, err)
}

// checkShared makes sure that none of many readers can write. Even a reader mounts a file system
// with its journal: writes that its writer had synced may be only there, and without the journal
// the reader would silently see an older state. The kernel would replay the journal under all other
// readers, unless the device itself is read-only: then it mounts a file system with an empty
// journal, and refuses any other with EROFS (ext4_load_journal, xlog_recover).
func checkShared(a attachment, d mount.Disk, req staging) error {
	if !req.shared() {
		return nil
	}
	readOnly, err := d.ReadOnly()
	if err == nil && !readOnly {
		return status.Errorf(codes.FailedPrecondition, "volume %s: it is shared read-only, but its device %s accepts writes", a.volume.Name, a.Device)
	}
	return unavailable(a, err)
}

// stagedLarger grows a staged file system. Its error must not be final, since that would mean that
// nothing is mounted; a file system that can only be grown unmounted is used at its old size.
func (s *nodeServer) stagedLarger(ctx context.Context, t *task, a attachment, d mount.Disk, fsType, point string) error {
	err := s.grow(ctx, t, d, fsType, point)
	if errors.Is(err, errGrowsUnmounted) {
		logOf(ctx).Warn("staged smaller than its device", "cause", err)
		return nil
	}
	return unavailable(a, err)
}

// mountFailed gives codes of their own to an option that the kernel refuses, damage, and a journal
// that no reader may replay; all other causes count as temporary.
func mountFailed(a attachment, err error) error {
	switch {
	case errors.Is(err, unix.EROFS):
		return status.Errorf(codes.FailedPrecondition, "volume %s: %v: its last writer did not unmount it, so its latest writes are in the journal, which readers cannot replay; "+
			"mount it once for writing on one node (a pod with a ReadWriteOnce claim does that), unmount and detach it, then share it", a.volume.Name, err)
	case errors.Is(err, unix.EINVAL):
		return status.Errorf(codes.InvalidArgument, "volume %s: %v (the kernel's log says more)", a.volume.Name, err)
	case errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.EBADMSG), errors.Is(err, unix.ENODEV):
		return status.Errorf(codes.FailedPrecondition, "volume %s: %v (the kernel's log says more)", a.volume.Name, err)
	}
	return unavailable(a, err)
}

// prepare makes the device ready to be mounted, and returns its file system.
func (s *nodeServer) prepare(ctx context.Context, t *task, a attachment, d mount.Disk, req staging) (fsType string, err error) {
	if used, fsType, err := s.usedAlready(a, d, req); used || err != nil {
		return fsType, err
	}
	if err := t.next(ctx, "look at what is on %s", a.Device); err != nil {
		return "", err
	}
	e, err := mount.Inspect(s.kernel, d)
	if err != nil {
		return "", unavailable(a, err)
	}
	p, err := decide(a.volume, req.fsType, e)
	if err != nil {
		return "", err
	}
	if p.format && req.readOnly {
		return "", status.Errorf(codes.FailedPrecondition, "volume %s: it has no file system yet, and a read-only access mode does not create one", a.volume.Name)
	}
	// A wrong option must be found before mkfs.
	if _, err := mountOptions(p.fsType, req.flags, req.readOnly); err != nil {
		return "", err
	}
	if p.format {
		return p.fsType, s.format(ctx, t, a, d, p)
	}
	if err := s.record(ctx, a, p.fsType); err != nil {
		return "", err
	}
	// xfs needs no such check: mounting it replays its log.
	if p.fsType == "ext4" && !req.readOnly {
		return p.fsType, s.checkExt4(ctx, t, a, d, e)
	}
	return p.fsType, nil
}

// checkExt4 repairs what e2fsck can repair without an operator. Where ext4 cannot be grown while
// mounted, it is grown here, after the full check that this requires.
func (s *nodeServer) checkExt4(ctx context.Context, t *task, a attachment, d mount.Disk, e mount.Contents) error {
	if err := t.next(ctx, "check ext4 on %s", a.Device); err != nil {
		return err
	}
	r, err := s.kernel.Run(d, "e2fsck", "-p", "{}")
	if err != nil {
		return unavailable(a, err)
	}
	if err := checked(r); err != nil || !e.Super.NeedsGrowing(e.Size) || s.kernel.Grows("ext4") {
		return err
	}
	if err := t.next(ctx, "check ext4 on %s in full, to grow it", a.Device); err != nil {
		return err
	}
	if r, err = s.kernel.Run(d, "e2fsck", "-f", "-p", "{}"); err != nil {
		return unavailable(a, err)
	}
	if err := checked(r); err != nil {
		return err
	}
	return unavailable(a, s.runGrow(ctx, t, d, "ext4", a.Device, e.Size))
}

// usedAlready finds out who holds the device exclusively. A file system still mounted in another
// mount namespace is live: it is neither checked nor made, and mounting it gives the same one.
func (s *nodeServer) usedAlready(a attachment, d mount.Disk, req staging) (used bool, fsType string, err error) {
	busy, err := d.Busy()
	if err != nil || !busy {
		return false, "", unavailable(a, err)
	}
	all, err := s.kernel.Mounts()
	if err != nil {
		return false, "", unavailable(a, err)
	}
	if here := all.FileSystemOn(a.number); len(here) > 0 {
		return false, "", status.Errorf(codes.FailedPrecondition, "volume %s: its file system is mounted already, on %s", a.volume.Name, here.Points())
	}
	elsewhere, err := s.kernel.MountsElsewhere(a.number)
	if err != nil {
		return false, "", unavailable(a, err)
	}
	start := make([]byte, 4096)
	if err := d.ReadCached(start, 0); err != nil {
		return false, "", unavailable(a, err)
	}
	super, ok := mount.ParseSuperblock(start)
	if !ok || len(elsewhere) == 0 {
		return false, "", status.Errorf(codes.Unavailable, "volume %s: its device is open exclusively: a program formats it, or another device is stacked on it", a.volume.Name)
	}
	if req.fsType != "" && req.fsType != super.FSType {
		return false, "", status.Errorf(codes.FailedPrecondition, "volume %s: %s was requested, but the device holds %s", a.volume.Name, req.fsType, super.FSType)
	}
	return true, super.FSType, nil
}

// recordTime is how long the manager may take to record the file system. It is independent of the
// call's deadline: an mkfs that used up the whole call must not be repeated.
const recordTime = 30 * time.Second

// recordRaw makes the manager record, before the raw device becomes writable for anyone, that it
// may hold any data from now on. A recorded file system stays recorded.
func (s *nodeServer) recordRaw(ctx context.Context, a attachment, w wanted) error {
	is := a.volume.Formatted
	if w.shared() || is != "" && !strings.HasPrefix(is, formatting) {
		return nil
	}
	return s.record(ctx, a, rawDevice)
}

// record makes the manager record the volume's file system.
func (s *nodeServer) record(ctx context.Context, a attachment, what string) error {
	if a.volume.Formatted == what && !strings.HasPrefix(what, formatting) {
		return nil // "formatting" is always sent: the record may be "raw" by now
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTime)
	defer cancel()
	v, err := s.cfg.Manager.UpdateVolume(ctx, &pb.UpdateVolumeRequest{Volume: a.volume.Id, Formatted: what})
	switch {
	case status.Code(err) == codes.AlreadyExists: // something else was recorded meanwhile
		return status.Errorf(codes.FailedPrecondition, "volume %s: %s", a.volume.Name, status.Convert(err).Message())
	case err != nil:
		return fromManager("record the file system of volume "+a.volume.Name, err)
	}
	a.volume.Formatted = v.Formatted
	return nil
}

// format makes a file system, between its two records.
func (s *nodeServer) format(ctx context.Context, t *task, a attachment, d mount.Disk, p plan) error {
	if err := t.next(ctx, "queue to make %s on %s", p.fsType, a.Device); err != nil {
		return err
	}
	select {
	case s.making <- struct{}{}:
		leave := sync.OnceFunc(func() { <-s.making })
		defer leave()
		defer context.AfterFunc(ctx, leave)()
	case <-ctx.Done():
		return waitEnded(ctx, "make "+p.fsType, "other file systems that are being made")
	}
	if err := s.record(ctx, a, formatting+p.fsType); err != nil {
		return err
	}
	if err := t.next(ctx, "make %s on %s", p.fsType, a.Device); err != nil {
		return err
	}
	program, args := mkfs(p.fsType, a.volume, p.fresh, s.e2fsVersion(d))
	r, err := s.kernel.Run(d, program, args...)
	switch {
	case err != nil: // the program is missing, or was killed
		return unavailable(a, fmt.Errorf("%w: %s", err, strings.TrimSpace(r.Output)))
	case r.Code != 0:
		return status.Errorf(codes.Internal, "volume %s: %s ended with code %d: %s", a.volume.Name, program, r.Code, strings.TrimSpace(r.Output))
	}
	start := make([]byte, 4096)
	if err := d.ReadDirect(start, 0); err != nil {
		return unavailable(a, err)
	}
	if made, ok := mount.ParseSuperblock(start); !ok || made.FSType != p.fsType || made.UUID != a.volume.Id {
		return status.Errorf(codes.Unavailable, "volume %s: %s succeeded, but the device does not hold the new file system", a.volume.Name, program)
	}
	logOf(ctx).Info("file system made", "type", p.fsType, "device", a.Device)
	return s.record(ctx, a, p.fsType)
}

func errorText(r mount.Result, err error) string {
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(r.Output)
}

// e2fsVersion asks mke2fs; an unknown one counts as old.
func (s *nodeServer) e2fsVersion(d mount.Disk) version {
	r, err := s.kernel.Run(d, "mkfs.ext4", "-V")
	if err != nil {
		return version{}
	}
	return parseE2fsVersion(r.Output)
}

// grow makes a mounted file system as large as its device, if it is smaller. It can stay in use.
func (s *nodeServer) grow(ctx context.Context, t *task, d mount.Disk, fsType, point string) error {
	size, err := d.Size()
	if err != nil {
		return err
	}
	// The superblock on the device of a mounted xfs is outdated, since changes go to the log first.
	// xfs_growfs asks the kernel, and does nothing if there is nothing to grow.
	if fsType == "ext4" {
		start := make([]byte, 4096)
		if err := d.ReadCached(start, 0); err != nil {
			return err
		}
		if super, ok := mount.ParseSuperblock(start); ok && !super.NeedsGrowing(size) {
			return nil
		}
	}
	if !s.kernel.Grows(fsType) {
		return errGrowsUnmounted
	}
	return s.runGrow(ctx, t, d, fsType, point, size)
}

// errGrowsUnmounted means that this process cannot grow a file system in use.
var errGrowsUnmounted = errors.New("grow the file system: while it is mounted, that needs the capability SYS_RESOURCE, which this process lacks; it grows when the volume is staged next")

// runGrow grows a file system to a size, at its mount point or on its device.
func (s *nodeServer) runGrow(ctx context.Context, t *task, d mount.Disk, fsType, where string, size uint64) error {
	if err := t.next(ctx, "grow %s on %s to %d bytes", fsType, where, size); err != nil {
		return err
	}
	program, args := "xfs_growfs", []string{"-d", where}
	if fsType == "ext4" {
		program, args = "resize2fs", []string{"{}"}
	}
	r, err := s.kernel.Run(d, program, args...)
	if err != nil || r.Code != 0 {
		return fmt.Errorf("grow the file system: %s ended with code %d: %s", program, r.Code, errorText(r, err))
	}
	return nil
}
